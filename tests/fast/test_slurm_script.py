"""launch=slurm: the script that is submitted, and what is refused. Drills run it on a real Slurm."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep.errors import ConfigError
from lockstep.launchers.slurm import SlurmLauncher
from support.commands import TRAIN


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SlurmLauncher]:
    """launcher(words of the command, overrides, **settings of launch), for the run folder `a folder`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    usual = {"nodes": 2, "ntasks_per_node": 1, "warning": 60, "options": [], "setup": [], "dry_run": False}
    usual |= dict.fromkeys(["cpus_per_task", "partition", "account", "time"]) | {"run_dir": "a folder"}

    def make(*words: str, overrides: Sequence[str] = (), **settings: Any) -> SlurmLauncher:
        hydra_cfg = OmegaConf.create({"overrides": {"task": list(overrides)}})
        monkeypatch.setattr(HydraConfig, "get", lambda: hydra_cfg)
        monkeypatch.setattr(sys, "argv", [TRAIN, *words])
        return SlurmLauncher(**(usual | settings))

    return make


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """commands(name=lines of a shell) puts these commands on the path."""

    def put(**scripts: str) -> None:
        for name, text in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


def test_the_script_asks_for_what_the_config_says_and_no_more(launcher, tmp_path):
    asked = {"time": "00:30:00", "partition": "gpu", "account": "me", "warning": 90, "cpus_per_task": 4}
    text = launcher(**asked, options=["--gpus-per-node=2"], setup=["module load cuda", "ulimit -l"]).script()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    options = ["--nodes=2", "--ntasks-per-node=1", "--signal=B:USR1@90", "--cpus-per-task=4", "--gpus-per-node=2"]
    options += ["--time=00:30:00", "--partition=gpu", "--account=me", "--requeue", f"--chdir={tmp_path}"]
    for line in (*options, f"--output='{tmp_path}/a folder/slurm-%j.out'"):
        assert f"#SBATCH {line}\n" in text
    assert "\nmodule load cuda\nulimit -l\n" in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=4 " in text  # srun ignores sbatch's
    plain = launcher().script()
    assert not [name for name in ("--time", "--partition", "--account", "--cpus-per-task") if name in plain]


HYDRAS = ["hydra.searchpath=[file:///my/conf]", "hydra/job_logging=none", "+hydra.verbose=true"]
OF_SWEEP = ["hydra.run.dir=x", "hydra.sweep.dir=y", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2", "hydra.mode=RUN"]


# The words of the command, its overrides, and what reaches the ranks.
TYPED = [
    ([], ["model=mlp", "launch=slurm", "launch.nodes=2", "+launch.extra=1", "seed=3"], "model=mlp seed=3"),
    (["--config-dir=/my conf", "--config-name=a", "-m"], [], "'--config-dir=/my conf' --config-name=a"),
    ([*HYDRAS, *OF_SWEEP], ["seed=3"], f"'{HYDRAS[0]}' {HYDRAS[1]} {HYDRAS[2]} seed=3"),
]


def test_the_ranks_run_the_typed_command_with_launch_env_in_a_fixed_folder(launcher, tmp_path):
    for words, overrides, reach in TYPED:
        text = launcher(*words, overrides=overrides).script()
        (command,) = [line for line in text.splitlines() if line.startswith("srun ")]
        end = f"launch=env 'hydra.run.dir=\"{tmp_path}/a folder\"' &"
        assert command == f"srun --kill-on-bad-exit=1 {sys.executable} {TRAIN} {reach} {end}"


def test_a_submission_that_cannot_work_is_refused(launcher, commands, tmp_path, monkeypatch):
    commands(sbatch="echo 'invalid partition' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"sbatch refused the job \(invalid partition\); change launch"):
        launcher().launch(print)
    commands(sbatch="echo '12;cluster'")
    launcher(partition="gpu").launch(print)
    assert "--partition=gpu" in (tmp_path / "a folder/job.sh").read_text()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="finds no sbatch here; type launch.dry_run=true"):
        launcher().validate()
