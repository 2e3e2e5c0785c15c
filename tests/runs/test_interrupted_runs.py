"""Signals and kills: every rank saves and exits, nothing is left behind, and the run goes on where it stopped."""

import os
import signal
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN, Command, ranks_of_torchrun, ranks_under, wait_for
from support.event_files import scalars
from support.run_folders import SLOW, count_resumptions, has_logged, position, read_log
from support.worlds import same_bits

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
        ("spawn", "rank", signal.SIGTERM),
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
def test_a_killed_launcher_leaves_no_orphan(start, tmp_path, launch):
    run = start(*LONG, f"launch={launch}")
    wait_for_snapshot(tmp_path / "run")
    ranks = ranks_under(run.process.pid) if launch != "fork" else forked_ranks(run)
    assert len(ranks) == 2
    run.process.kill()
    wait_for(lambda: not alive(ranks), "end of the ranks", limit=3)
    run.finish(-signal.SIGKILL)  # its output ends when the last process that holds it has ended: the fork server, too
    assert "stopped early at step" in read_log(tmp_path / "run")


def forked_ranks(run: Command) -> list[int]:
    """The ranks of launch=fork have the command line of their parent."""
    return ranks_of_torchrun(run.process.pid)


def test_killed_workers_are_restarted_by_torchrun_and_end_with_the_same_bits(start, tmp_path):
    torchrun = [*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=3", TRAIN, *SLOW, "trainer.epochs=6"]
    start(*torchrun, "hydra.run.dir=undisturbed").finish()
    run = start(*torchrun, "hydra.run.dir=disturbed")
    disturbed = tmp_path / "disturbed"
    wait_for_snapshot(disturbed)
    os.kill(ranks_of_torchrun(run.process.pid)[0], signal.SIGKILL)
    run.finish()
    assert count_resumptions(disturbed) == 1
    assert same_bits(tmp_path / "undisturbed", disturbed)
    steps = [step for step, _ in scalars(disturbed)["train/running_loss"]]
    assert steps == sorted(set(steps))


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(start, train, tmp_path):
    first = start(*LONG)
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 1/"), "training")
    record = {path.name: path.read_bytes() for path in (tmp_path / "run/.hydra").iterdir()}
    assert "trainer.epochs=200" in record["overrides.yaml"].decode()
    second = train("hydra.run.dir=run", "seed=1", code=2)
    assert second.sentence.startswith(f"lockstep: another run holds {tmp_path}/run (pid {first.process.pid} on ")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run/.hydra").iterdir()} == record
    first.process.terminate()
    first.finish(75)
