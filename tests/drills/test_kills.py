"""Kills again and again: one restart each, no step trained twice, the same bits at the end.

What was not disturbed is made by launch=fork, whose start costs least: launchers change no bit. Whole runs that are
killed and typed again: test_sharded_kills.py.
"""

import os
import random
import signal
import statistics
import time

import pytest

from support.commands import PYTHON_TRAIN, STARTERS, TORCHRUN, TRAIN, ranks_of_torchrun, ranks_under, wait_for
from support.ports import free_port
from support.run_folders import (
    SLOW,
    assert_one_curve,
    count_resumptions,
    newest_snapshot,
    position,
    read_log,
    stopped_at,
)
from support.worlds import same_bits

pytestmark = pytest.mark.drill

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "1"))
RUN = [*SLOW, "hydra.run.dir=run"]


def kill_a_rank(ranks, folder, kills_before):
    """Kill one rank. Returns the seconds until the next snapshot after the restart."""
    time.sleep(random.uniform(0, 0.2))  # some snapshots long
    os.kill(random.choice(ranks), signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: count_resumptions(folder) > kills_before, "restart", limit=120)
    resumed = position(folder)[0]
    wait_for(lambda: position(folder)[0] > resumed, "step after the restart", limit=120)
    return time.monotonic() - killed


@pytest.mark.timeout(600 + 120 * KILLS)
@pytest.mark.parametrize("starter", ["torchrun", "launch=torchrun"])
def test_kills_cost_one_restart_each_and_no_bit(start, start_faulty, tmp_path, starter):
    training, folder = [*RUN, f"trainer.epochs={4 * KILLS}"], tmp_path / "run"
    start(*STARTERS["launch=fork"], *training, "hydra.run.dir=undisturbed").finish()
    agents = {
        "torchrun": (
            [*TORCHRUN, "--standalone", "--nproc_per_node=2", f"--max-restarts={KILLS}", TRAIN],
            ranks_of_torchrun,
        ),
        "launch=torchrun": ([*STARTERS["launch=torchrun"], f"launch.max_restarts={KILLS}"], ranks_under),
    }
    (command, ranks), begin = agents[starter], time.monotonic()
    run = start_faulty(*command, *training)
    wait_for(lambda: position(folder)[0] >= 5, "first snapshot", limit=120)
    first = time.monotonic() - begin
    waits = [kill_a_rank(ranks(run.process.pid), folder, kill) for kill in range(KILLS)]
    run.finish()
    assert count_resumptions(folder) == KILLS
    assert same_bits(tmp_path / "undisturbed", folder)
    assert_one_curve(folder)
    middle = statistics.median(waits)
    print(f"{KILLS} kills, one restart each; next snapshot after {middle:.1f} s, the first after {first:.1f} s")
    assert middle <= 3 * first


def test_a_killed_torchrun_costs_no_step_and_leaves_no_orphan(start_faulty, tmp_path):
    folder = tmp_path / "run"
    run = start_faulty(*STARTERS["torchrun"], *RUN, "trainer.epochs=4000")
    wait_for(lambda: position(folder)[0] >= 5, "first snapshot")
    ranks = ranks_of_torchrun(run.process.pid)
    run.process.kill()
    run.finish(code=None)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks), "end of the ranks", 10)
    assert {stopped_at(folder, f"logs/rank{rank}.log") for rank in (0, 1)} == {position(folder)[0]}


def test_an_asynchronous_server_or_worker_that_is_killed_or_asked_to_stop_costs_no_run(start, tmp_path):
    words = ["strategy=async_parameter_server", "strategy.sync_every=20", "model=mlp", "model.width=1024"]
    words += ["trainer.batch_size=16", "trainer.epochs=100", "hydra.run.dir=run", "launch.nproc_per_node=3"]
    command, folder = [*STARTERS["launch=torchrun"], "launch.max_restarts=1", *words], tmp_path / "run"
    for number, rank in enumerate((0, 2)):
        run = start(*command)
        wait_for(lambda: list(folder.glob("snapshots/step_*[0-9]")), "snapshot")
        wait_for(lambda known=2 * number: count_resumptions(folder) == known, "training")
        os.kill(ranks_under(run.process.pid)[rank], signal.SIGKILL)
        wait_for(lambda known=2 * number + 1: count_resumptions(folder) == known, "restart")
        time.sleep(1)
        os.kill(ranks_under(run.process.pid)[rank], signal.SIGTERM)
        run.finish(None)
        assert read_log(folder).count("stopped early at step ") == number + 1
    start(*command, f"trainer.max_steps={newest_snapshot(folder)['progress']['step'] + 10}").finish()


def start_agent(start, port, is_host):
    """One of two torchrun agents of --nnodes=1:2, with a rank each."""
    conf = f"is_host={is_host},keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=2"
    world = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=5", "--local-addr=127.0.0.1"]
    world += ["--rdzv-backend=c10d", "--rdzv-id=drill", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"]
    training = [TRAIN, *RUN, "scheduler=constant", "trainer.epochs=4000"]
    return start(*TORCHRUN, *world, *training, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)


@pytest.mark.timeout(600)
def test_an_elastic_world_shrinks_and_grows_without_a_step_backward(start, tmp_path):
    """One of two agents is killed, its successor joins, and a lone process ends the run."""
    port, folder = free_port(), tmp_path / "run"

    def wait_for_world(size):
        wait_for(lambda: folder.exists() and position(folder)[1] == size, f"snapshot of {size} ranks")

    host, guest = start_agent(start, port, 1), start_agent(start, port, 0)
    wait_for_world(2)
    for pid in [guest.process.pid, *ranks_of_torchrun(guest.process.pid)]:
        os.kill(pid, signal.SIGKILL)
    wait_for_world(1)
    guest = start_agent(start, port, 0)
    wait_for_world(2)
    for agent in (guest, host):  # the host's agent holds the store, and ends last
        agent.process.terminate()
        agent.finish(code=None)
    epochs = newest_snapshot(folder)["progress"]["epoch"] + 1
    run = start(*PYTHON_TRAIN, *RUN, "scheduler=constant", f"trainer.epochs={epochs}").finish()
    assert "resumed from " in run.output
    assert_one_curve(folder)
