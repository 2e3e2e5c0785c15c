"""Signals and kills: every rank saves and exits, nothing is left behind, and the run goes on where it stopped."""

import os
import signal
from pathlib import Path

import pytest

from support.commands import (
    PYTHON_TRAIN,
    TORCHRUN,
    TRAIN,
    ranks_of_torchrun,
    ranks_under,
    wait_for,
)
from support.ports import free_port
from support.run_folders import SLOW, has_logged, position, read_log

LONG = [*PYTHON_TRAIN, *SLOW, "trainer.epochs=200", "hydra.run.dir=run"]


def wait_for_snapshot(folder: Path) -> None:
    wait_for(lambda: position(folder)[0] >= 5, "snapshot")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize(
    ("launch", "who", "number"),
    [
        ("env", "parent", signal.SIGTERM),
        ("spawn", "parent", signal.SIGINT),
        ("torchrun", "rank", signal.SIGTERM),
        ("torchrun", "parent", signal.SIGUSR1),
    ],
)
def test_after_a_signal_all_ranks_save_the_same_step_and_exit_with_75(start, tmp_path, launch, who, number):
    run = start(*LONG, f"launch={launch}")
    wait_for_snapshot(tmp_path / "run")
    ranks = ranks_under(run.process.pid)
    assert len(ranks) == (0 if launch == "env" else 2)
    os.kill(run.process.pid if who == "parent" else ranks[-1], number)
    run.finish(75)
    step = position(tmp_path / "run")[0]
    assert f"stopped early at step {step}; go on there with hydra.run.dir={tmp_path}/run" in run.output
    assert not alive(ranks)


@pytest.mark.parametrize("launch", ["spawn", "fork", "torchrun"])
def test_a_killed_launcher_leaves_no_orphan_and_no_temporary_file(start, tmp_path, launch, short_folder):
    temporary = short_folder
    run = start(*LONG, f"launch={launch}", TMPDIR=temporary)
    wait_for_snapshot(tmp_path / "run")
    ranks = ranks_under(run.process.pid)
    assert len(ranks) == 2
    run.process.kill()
    wait_for(lambda: not alive(ranks), "end of the ranks")
    run.finish(-signal.SIGKILL)  # its output ends when the last process that holds it has ended: the fork server, too
    assert "stopped early at step" in read_log(tmp_path / "run")
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []  # a cache


def test_ranks_that_still_import_end_with_a_killed_torchrun(start, tmp_path):
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(300)\n")
    torchrun = [*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, "model._target_=slow.Net"]
    run = start(*torchrun, PYTHONPATH=tmp_path)
    wait_for(lambda: (tmp_path / "importing").exists(), "import of the model")
    ranks = ranks_of_torchrun(run.process.pid)
    assert len(ranks) == 2
    run.process.kill()
    wait_for(lambda: not alive(ranks), "end of the ranks")


def test_a_rank_started_by_hand_goes_on_after_its_shell(start, tmp_path):
    words = " ".join([*PYTHON_TRAIN, "model=mlp", "trainer.epochs=100", "hydra.run.dir=run"])
    shell = f"RANK=0 WORLD_SIZE=1 MASTER_PORT={free_port()} {words} & until [ -s run/train.log ]; do sleep 0.1; done"
    run = start("bash", "-c", shell)
    run.finish()  # its output ends with the rank
    assert "finished: val loss" in read_log(tmp_path / "run")


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(start, tmp_path):
    first = start(*LONG)
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 1/"), "training")
    record = {path.name: path.read_bytes() for path in (tmp_path / "run/.hydra").iterdir()}
    assert "trainer.epochs=200" in record["overrides.yaml"].decode()
    for launch in ("env", "fork"):
        second = start(*LONG, f"launch={launch}").finish(2)
        assert second.sentence.startswith(f"lockstep: another run holds {tmp_path}/run (pid {first.process.pid} on ")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run/.hydra").iterdir()} == record
    assert [path.name for path in (tmp_path / "run/logs").iterdir()] == ["rank0.log"]
    for name in ("train.log", "logs/rank0.log"):
        assert (tmp_path / "run" / name).read_text().count("rank 0 of") == 1
    assert not list((tmp_path / "run").glob("failure.*"))
    first.process.terminate()
    first.finish(75)


def test_two_runs_begun_in_the_same_second_have_two_folders(start, tmp_path):
    runs = [start(*PYTHON_TRAIN, "model=mlp", "trainer.max_steps=2", f"seed={seed}") for seed in range(3)]
    for run in runs:
        run.finish()
    folders = list(tmp_path.glob("outputs/*/*/model.pt"))
    assert len(folders) == 3
