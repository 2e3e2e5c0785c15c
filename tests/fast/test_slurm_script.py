"""launch=slurm: the script that is submitted, and what is refused."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep.errors import ConfigError, RankFailed, StoppedEarly
from lockstep.launchers.slurm import SlurmLauncher
from support.commands import TRAIN

NOTHING_SET: dict[str, Any] = {
    "nodes": 2,
    "ntasks_per_node": 1,
    "cpus_per_task": None,
    "partition": None,
    "account": None,
    "time": None,
    "warning": 60,
    "options": [],
    "setup": [],
    "dry_run": True,
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """script(words of the command, **settings of launch) -> the sbatch script for the run folder `a folder`."""

    def make(*words: str, overrides: Sequence[str] = (), **settings: Any) -> str:
        hydra_cfg = OmegaConf.create({"overrides": {"task": list(overrides)}})
        monkeypatch.setattr(HydraConfig, "get", lambda: hydra_cfg)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [TRAIN, *words])
        return SlurmLauncher(run_dir="a folder", **(NOTHING_SET | settings)).script()

    return make


def test_the_script_asks_for_what_the_config_says(script, tmp_path):
    options = ["--gpus-per-node=2"]
    text = script(time="00:30:00", partition="gpu", account="me", warning=90, cpus_per_task=4, options=options)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    for line in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=00:30:00",
        "--partition=gpu",
        "--account=me",
        "--signal=B:USR1@90",
        "--cpus-per-task=4",
        "--gpus-per-node=2",
        "--requeue",
        f"--chdir={tmp_path}",
        f"--output='{tmp_path}/a folder/slurm-%j.out'",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=4 " in text  # srun ignores sbatch's


def test_what_is_not_set_is_left_to_the_cluster(script):
    text = script(setup=["module load cuda", "ulimit -l unlimited"])
    assert "\nmodule load cuda\nulimit -l unlimited\n" in text
    for option in ("--time", "--partition", "--account", "--cpus-per-task"):
        assert option not in text


def test_the_ranks_run_the_typed_command_with_launch_env_in_a_fixed_folder(script, tmp_path):
    typed = ["model=mlp", "launch=slurm", "launch.nodes=2", "+launch.extra=1", "trainer.epochs=3"]
    text = script(*typed, overrides=typed)
    (command,) = [line for line in text.splitlines() if line.startswith("srun ")]
    words = f"model=mlp trainer.epochs=3 launch=env 'hydra.run.dir=\"{tmp_path}/a folder\"' &"
    assert command == f"srun --kill-on-bad-exit=1 {sys.executable} {TRAIN} {words}"


@pytest.mark.parametrize("code", [0, 1, 5, 75, 76, 130])
def test_a_job_is_requeued_only_if_the_run_stopped_early(script, tmp_path, code):
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "8"}
    assert subprocess.run(["bash", "-c", script()], env=env).returncode == code
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == ("requeue 8\n" if code in (75, 76) else "")


@pytest.mark.parametrize("flag", [["--config-dir=/my conf"], ["--config-dir", "/my conf"], ["-cd", "/my conf"]])
def test_the_flags_that_choose_the_config_reach_the_ranks(script, flag):
    text = script("model=mine", *flag, "--config-name=other", "-m", overrides=["model=mine"])
    assert f"{TRAIN} '--config-dir=/my conf' --config-name=other model=mine launch=env " in text


def test_what_hydra_itself_was_told_reaches_the_ranks_too(script):
    kept = ["hydra.searchpath=[file:///my/conf]", "hydra/job_logging=none", "+hydra.verbose=true"]
    dropped = ["hydra.run.dir=x", "hydra.sweep.dir=y", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2"]
    dropped += ["hydra/sweeper=lockstep", "hydra.mode=RUN"]
    text = script("optimizer=mine", *kept, *dropped, overrides=["optimizer=mine"])
    words = "'hydra.searchpath=[file:///my/conf]' hydra/job_logging=none +hydra.verbose=true optimizer=mine"
    assert f"{TRAIN} {words} launch=env 'hydra.run.dir=" in text


def test_a_submission_that_cannot_work_is_refused(tmp_path, monkeypatch):
    launcher = SlurmLauncher(run_dir=str(tmp_path), **(NOTHING_SET | {"dry_run": False}))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="finds no sbatch here; type launch.dry_run=true"):
        launcher.validate()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="a launcher inside torchrun"):
        launcher.validate()


def test_what_sbatch_says_is_shown_when_it_refuses_the_job(tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    launcher = SlurmLauncher(run_dir=str(tmp_path), **(NOTHING_SET | {"dry_run": False, "partition": "gpu"}))
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create({"overrides": {"task": []}}))
    with pytest.raises(ConfigError, match=r"sbatch refused the job \(invalid partition\); change launch"):
        launcher.launch(print)
    sbatch.write_text("#!/bin/sh\necho '12;cluster'\n")
    launcher.launch(print)
    assert "--partition=gpu" in Path(tmp_path, "job.sh").read_text()


def test_a_job_of_a_sweep_is_waited_for_and_cancelled_at_a_signal(tmp_path, monkeypatch):
    commands = {"sbatch": f"echo 12; [ $2 = --wait ] && until [ -e {tmp_path}/end ]; do sleep 0.1; done; exit 3"}
    commands["scancel"] = f"touch {tmp_path}/end"
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LOCKSTEP_SWEEP", str(tmp_path))
    launcher = SlurmLauncher(run_dir=str(tmp_path), **(NOTHING_SET | {"dry_run": False}))
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create({"overrides": {"task": []}}))
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with pytest.raises(StoppedEarly, match="Slurm job 12 was cancelled"):
        launcher.launch(print)
    with pytest.raises(RankFailed, match="Slurm job 12 ended with 3; see "):
        launcher.launch(print)
