"""Kills again and again: one restart each, no step trained twice, the same bits at the end.

What was not disturbed is made by launch=fork, whose start costs least: launchers change no bit. Whole runs that are
killed and typed again: test_sharded_kills.py.
"""

import os
import random
import signal
import statistics
import time
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN, Command, ranks_of_torchrun, wait_for
from support.run_folders import SLOW, assert_one_curve, count_resumptions, position, stopped_at
from support.worlds import same_bits

pytestmark = pytest.mark.drill

TESTS = Path(__file__).parents[1]
KILLS = int(os.environ.get("LOCKSTEP_KILLS", "3"))
STANDALONE = [*TORCHRUN, "--standalone", "--nproc_per_node=2"]


def kill_a_rank(run: Command, folder: Path, kills_before: int) -> float:
    """Kill one rank. Returns the seconds until the next snapshot after the restart."""
    time.sleep(random.uniform(0, 0.2))  # some snapshots long
    os.kill(random.choice(ranks_of_torchrun(run.process.pid)), signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: count_resumptions(folder) > kills_before, "restart", limit=120)
    resumed = position(folder)[0]
    wait_for(lambda: position(folder)[0] > resumed, "step after the restart", limit=120)
    return time.monotonic() - killed


@pytest.mark.timeout(600 + 120 * KILLS)
def test_kills_cost_one_restart_each_and_no_bit(start, start_faulty, tmp_path):
    training, folder = [*SLOW, f"trainer.epochs={4 * KILLS}"], tmp_path / "run"
    start(*PYTHON_TRAIN, "launch=fork", *training, "hydra.run.dir=undisturbed").finish()
    run = start_faulty(*STANDALONE, f"--max-restarts={KILLS}", TRAIN, *training, "hydra.run.dir=run")
    wait_for(lambda: position(folder)[0] >= 5, "first snapshot")
    waits = [kill_a_rank(run, folder, kill) for kill in range(KILLS)]
    run.finish()
    assert count_resumptions(folder) == KILLS
    assert same_bits(tmp_path / "undisturbed", folder)
    assert_one_curve(folder)
    middle, longest = statistics.median(waits), max(waits)
    print(f"{KILLS} kills, one restart each; next snapshot after {middle:.1f} s (at most {longest:.1f} s)")
    assert middle <= 20  # other drills run beside this one


def test_a_crash_and_a_restart_by_our_own_torchrun_cost_no_bit(start, start_faulty, tmp_path):
    words = [*SLOW, "trainer.epochs=1", "model._target_=support.faults.FaultyModel"]
    start(*PYTHON_TRAIN, "launch=fork", *words, "hydra.run.dir=undisturbed", PYTHONPATH=TESTS).finish()
    restarts = [*PYTHON_TRAIN, "launch=torchrun", "launch.max_restarts=1"]
    start_faulty(*restarts, *words, "hydra.run.dir=run", FAULT="forward/segfault_once:1:23", PYTHONPATH=TESTS).finish()
    assert (tmp_path / "crashed").exists()
    assert count_resumptions(tmp_path / "run") == 1
    assert same_bits(tmp_path / "undisturbed", tmp_path / "run")
    assert_one_curve(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_torchrun_costs_no_step_and_leaves_no_orphan(start_faulty, tmp_path, number):
    folder = tmp_path / "run"
    run = start_faulty(*STANDALONE, TRAIN, *SLOW, "trainer.epochs=4000", "hydra.run.dir=run")
    wait_for(lambda: position(folder)[0] >= 5, "first snapshot")
    ranks = ranks_of_torchrun(run.process.pid)
    run.send(number)
    run.finish(code=None)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks), "end of the ranks", 3)
    assert {stopped_at(folder, f"logs/rank{rank}.log") for rank in (0, 1)} == {position(folder)[0]}
