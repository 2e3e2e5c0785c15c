"""Signals and kills: every rank saves and exits, nothing is left behind, and the run goes on where it stopped."""

import os
import signal

import pytest

from support.commands import PYTHON_TRAIN, ranks_under, wait_for
from support.run_folders import SLOW, position, read_log

LONG = [*PYTHON_TRAIN, *SLOW, "trainer.epochs=200", "hydra.run.dir=run"]


def wait_for_snapshot(folder):
    wait_for(lambda: position(folder)[0] >= 5, "snapshot")


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize(
    ("launch", "who", "number"),
    [("env", "parent", signal.SIGTERM), ("spawn", "parent", signal.SIGINT), ("torchrun", "rank", signal.SIGUSR1)],
)
def test_after_a_signal_all_ranks_save_the_same_step_and_exit_with_75(start, tmp_path, launch, who, number):
    run = start(*LONG, f"launch={launch}")
    wait_for_snapshot(tmp_path / "run")
    ranks = ranks_under(run.process.pid)
    assert len(ranks) == (0 if launch == "env" else 2)
    if launch == "env":  # a second run in the same folder is refused and changes nothing
        files = {path: path.read_bytes() for path in tmp_path.glob("run/.hydra/*")}
        assert b"trainer.epochs=200" in files[tmp_path / "run/.hydra/overrides.yaml"]
        for other in ("env", "fork"):
            second = start(*LONG, f"launch={other}").finish(2)
            assert second.sentence.startswith(f"lockstep: another run holds {tmp_path}/run (pid {run.process.pid} on ")
        assert {path: path.read_bytes() for path in tmp_path.glob("run/.hydra/*")} == files
        assert [path.name for path in (tmp_path / "run/logs").iterdir()] == ["rank0.log"]
        for name in ("train.log", "logs/rank0.log"):
            assert (tmp_path / "run" / name).read_text().count("rank 0 of") == 1
        assert not list((tmp_path / "run").glob("failure.*"))
    os.kill(run.process.pid if who == "parent" else ranks[-1], number)
    run.finish(75)
    step = position(tmp_path / "run")[0]
    assert f"stopped early at step {step}; go on there with hydra.run.dir={tmp_path}/run" in run.output
    assert not alive(ranks)


@pytest.mark.parametrize("launch", ["spawn", "fork"])
def test_a_killed_launcher_leaves_no_orphan_and_no_temporary_file(start, tmp_path, launch, short_folder):
    run = start(*LONG, f"launch={launch}", TMPDIR=short_folder)
    wait_for_snapshot(tmp_path / "run")
    ranks = ranks_under(run.process.pid)
    assert len(ranks) == 2
    run.process.kill()
    wait_for(lambda: not alive(ranks), "end of the ranks")
    run.finish(-signal.SIGKILL)  # its output ends when the last process that holds it has ended
    assert "stopped early at step" in read_log(tmp_path / "run")
    assert [path.name for path in short_folder.iterdir() if not path.name.startswith("torchinductor_")] == []  # a cache


def test_two_runs_begun_in_the_same_second_have_two_folders(start, tmp_path):
    for run in [start(*PYTHON_TRAIN, "model=mlp", "trainer.max_steps=2", f"seed={seed}") for seed in range(3)]:
        run.finish()
    assert len(list(tmp_path.glob("outputs/*/*/model.pt"))) == 3
