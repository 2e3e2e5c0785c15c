"""Ranks whose peers never come, a long preparation of the data, and ranks that leave with 0 in mid-run."""

import os
import signal
import time
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, STARTERS, wait_for
from support.phases import PARTS, in_phase
from support.ports import free_port

pytestmark = pytest.mark.drill

TESTS = Path(__file__).parents[1]


def lone_rank(start_faulty, rank: int, host: str, *words: str):
    """One rank of a world of two. The other one never comes."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    command = [*PYTHON_TRAIN, "model=mlp", "backend=gloo", *words]
    return start_faulty(*command, MASTER_ADDR=host, MASTER_PORT=free_port(), **place)


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "rank 1 did not join the rendezvous within"), (1, "rank 0 does not listen at 127.0.0.1:")]
)
def test_a_lone_rank_waits_for_backend_timeout_and_says_who_is_missing(start_faulty, rank, words):
    run = lone_rank(start_faulty, rank, "127.0.0.1", "backend.timeout=3").finish(2)
    assert f"lockstep: {words}" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_lone_rank_heeds_the_first_signal(start_faulty, rank, number):
    run = lone_rank(start_faulty, rank, "127.0.0.1")
    time.sleep(6)  # it waits now, or will
    asked = time.monotonic()
    run.send(number)
    run.finish(130 if number == signal.SIGINT else 76)
    assert time.monotonic() - asked < 20  # not until backend.timeout, 300 s
    assert "; there is nothing to save" in run.output
    assert "Traceback" not in run.output


def test_an_unknown_host_is_said_soon(start_faulty):
    run = lone_rank(start_faulty, 1, "no-such-host.invalid").finish(2)
    assert run.sentence.startswith("lockstep: rank 0 does not listen at no-such-host.invalid:")


def test_a_preparation_may_take_longer_than_backend_timeout(start_faulty, tmp_path):
    command = [*STARTERS["torchrun"], *PARTS, "backend=gloo", "backend.timeout=5", "trainer.epochs=1"]
    start_faulty(*command, LINGER="prepare:9", PYTHONPATH=TESTS).finish()
    assert not (tmp_path / "in-prepare-1").exists()  # only the first rank of a machine prepares


def test_ranks_that_wait_for_a_preparation_end_with_it(start_faulty, tmp_path):
    run = start_faulty(*STARTERS["torchrun"], *PARTS, "backend=gloo", LINGER="prepare:600", PYTHONPATH=TESTS)
    wait_for(lambda: in_phase(tmp_path, "prepare"), "preparation")
    (rank_zero,) = [
        pid
        for pid in map(int, Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split())
        if b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    killed = time.monotonic()
    run.broken_at = time.time()
    os.kill(rank_zero, signal.SIGKILL)
    run.finish(code=None)
    assert time.monotonic() - killed < 30
    assert run.process.returncode != 0


@pytest.mark.parametrize("starter", STARTERS)
def test_sys_exit_with_0_in_mid_run_is_a_failure_that_names_the_line(start_faulty, starter):
    run = start_faulty(*STARTERS[starter], *PARTS, LEAVE="sys.exit", PYTHONPATH=TESTS).finish(code=None)
    assert run.process.returncode not in (0, 75)
    assert "left before the end of the training" in run.output
    assert "phases.py" in run.output
    assert "finished:" not in run.output


@pytest.mark.parametrize("starter", ["launch=torchrun", "launch=fork"])
def test_a_second_sigterm_beside_a_rank_that_hangs_ends_with_76_and_names_the_last_snapshot(
    start_faulty, tmp_path, starter
):
    run = start_faulty(*STARTERS[starter], *PARTS, "snapshot.every=2steps", HANG=1, PYTHONPATH=TESTS)
    wait_for(lambda: (tmp_path / "hangs").exists(), "hang")
    run.send(signal.SIGTERM)
    time.sleep(4)
    run.send(signal.SIGTERM)
    run.finish(76)
    assert "the last good snapshot is " in run.output
    assert "snapshots/step_00000004; go on there with hydra.run.dir=" in run.output
