"""The long drills: kills again and again, worlds that shrink and grow, everything gone at once."""

import json
import os
import random
import re
import signal
import statistics
import sys
import time

import pytest

from conftest import TORCHRUN, TRAIN, events, free_port, wait_for
from lockstep import snapshot
from test_resume import SLOW, children, cmdline, model, ranks_under, same_bits

pytestmark = pytest.mark.drill


def position(folder):
    """(step, world size) of the newest snapshot; (0, 0) before the first."""
    for path in snapshot.complete(folder / "snapshots")[:2]:
        try:
            beside = json.loads(path.with_suffix(".json").read_text())
            return beside["step"], beside["world_size"]
        except FileNotFoundError:  # it was just deleted
            pass
    return 0, 0


def ranks_of(pid):
    return [child for child in children(pid) if b"train.py" in cmdline(child)]


def lives(folder):
    """How often the run has resumed."""
    return (folder / "train.log").read_text().count("resumed from")


def assert_one_curve(folder):
    curves = {tag: [step for step, _ in curve] for tag, curve in events(folder).items()}
    for tag, steps in curves.items():
        assert steps == sorted(set(steps)), tag
    assert curves["train/lr"] == list(range(10, curves["train/lr"][-1] + 1, 10))


@pytest.mark.timeout(600)
def test_twenty_kills_cost_one_restart_each_and_no_bit(start, tmp_path):
    torchrun = [*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=3", TRAIN, *SLOW, "trainer.epochs=20"]
    start(*torchrun, "hydra.run.dir=undisturbed").finish()
    waits = []
    for number in range(7):
        folder = tmp_path / str(number)
        run = start(*torchrun, f"hydra.run.dir={folder}")
        wait_for(lambda folder=folder: position(folder)[0] >= 5, "first snapshot")
        for kill in range(3):
            time.sleep(random.uniform(0, 0.5))
            os.kill(random.choice(ranks_of(run.process.pid)), signal.SIGKILL)
            killed = time.monotonic()
            wait_for(lambda folder=folder, kill=kill: lives(folder) > kill, "restart", limit=30)
            resumed = position(folder)[0]
            wait_for(lambda folder=folder, resumed=resumed: position(folder)[0] > resumed, "step after the restart", limit=30)
            waits.append(time.monotonic() - killed)
        run.finish()
        assert lives(folder) == 3
        assert same_bits(model(tmp_path / "undisturbed"), model(folder))
        assert_one_curve(folder)
    print(f"{len(waits)} kills, one restart each; next snapshot after {statistics.median(waits):.1f} s (at most {max(waits):.1f} s)")
    assert statistics.median(waits) <= 8


@pytest.mark.parametrize("victims", ["all ranks", "launcher", "launcher and all ranks"])
def test_killed_as_a_whole_and_started_again_by_hand_a_run_loses_no_bit(start, tmp_path, victims):
    command = [sys.executable, TRAIN, *SLOW, "launch=torchrun"]
    start(*command, "hydra.run.dir=undisturbed").finish()
    run = start(*command, "hydra.run.dir=disturbed")
    wait_for(lambda: position(tmp_path / "disturbed")[0] >= 5, "first snapshot")
    time.sleep(random.uniform(0, 0.5))
    ranks = ranks_under(run.process.pid)
    for pid in [run.process.pid] * ("launcher" in victims) + ranks * ("ranks" in victims):
        os.kill(pid, signal.SIGKILL)
    run.finish(code=None)
    wait_for(lambda: not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")], "end of the ranks", limit=5)
    again = start(*command, "hydra.run.dir=disturbed").finish()
    assert again.output.count("resumed from") == 1
    assert same_bits(model(tmp_path / "undisturbed"), model(tmp_path / "disturbed"))
    assert_one_curve(tmp_path / "disturbed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_to_torchrun_costs_no_step_and_leaves_no_orphan(start, tmp_path, number):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, *SLOW, "trainer.epochs=4000", "hydra.run.dir=run")
    wait_for(lambda: position(tmp_path / "run")[0] >= 5, "first snapshot")
    ranks = ranks_of(run.process.pid)
    os.kill(run.process.pid, number)
    run.finish(code=None)
    wait_for(lambda: not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")], "end of the ranks", limit=3)
    told = {re.search(r"stopped early at step (\d+)", (tmp_path / "run" / "logs" / f"rank{rank}.log").read_text())[1] for rank in (0, 1)}
    assert told == {str(position(tmp_path / "run")[0])}


@pytest.mark.timeout(600)
def test_an_elastic_world_shrinks_and_grows_without_a_backward_step(start, tmp_path):
    """Two torchrun agents of --nnodes=1:2; one is killed, its successor joins, and a lone process ends the run."""
    port, folder = free_port(), None

    def agent(host):
        conf = f"is_host={host},keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=2"
        return start(*TORCHRUN, "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=drill",
                     f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", f"--rdzv-conf={conf}", TRAIN, *SLOW, "scheduler=constant",
                     "trainer.epochs=4000", TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)  # fmt: skip

    def folders():
        return list(tmp_path.glob("outputs/[0-9]*/*"))

    host, guest = agent(1), agent(0)
    wait_for(lambda: folders() and position(folders()[0])[1] == 2, "world of two")
    folder = folders()[0]
    for pid in [guest.process.pid, *ranks_of(guest.process.pid)]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: position(folder)[1] == 1, "world of one")
    guest = agent(0)
    wait_for(lambda: position(folder)[1] == 2, "world of two again")
    for one in (guest, host):  # the host's agent holds the store, and goes last
        one.process.terminate()
        one.finish(code=None)
    assert folders() == [folder]
    epochs = json.loads(snapshot.complete(folder / "snapshots")[0].with_suffix(".json").read_text())["epoch"] + 1
    run = start(sys.executable, TRAIN, *SLOW, "scheduler=constant", f"trainer.epochs={epochs}", f"hydra.run.dir={folder}").finish()
    assert re.search(r"resumed from .*step_", run.output)
    assert_one_curve(folder)
