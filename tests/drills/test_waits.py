"""Ranks whose peers never come, a long preparation of the data, and loader workers of runs that are stopped."""

import os
import signal
import time
from pathlib import Path

import pytest

from support.commands import LAUNCHERS, PYTHON_TRAIN, children, own_data, processes_of, wait_for
from support.faults import PARTS, is_at
from support.ports import free_port
from support.run_folders import SLOW, position, stopped_at
from support.worlds import same_bits

pytestmark = pytest.mark.drill


@pytest.mark.parametrize(
    ("rank", "host", "number", "code", "said"),
    [
        (0, "127.0.0.1", None, 2, "lockstep: rank 1 did not join the rendezvous within"),
        (1, "127.0.0.1", None, 2, "lockstep: rank 0 does not listen at 127.0.0.1:"),
        (1, "no-such-host.invalid", None, 2, "lockstep: rank 0 does not listen at no-such-host.invalid:"),
        (0, "127.0.0.1", signal.SIGINT, 130, "; there is nothing to save"),
        (1, "127.0.0.1", signal.SIGTERM, 76, "; there is nothing to save"),
    ],
)
def test_a_rank_whose_peer_never_comes_says_so_and_heeds_the_first_signal(start_faulty, rank, host, number, code, said):
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": host}
    words = ["model=mlp", "backend=gloo", *["backend.timeout=3"] * (number is None and host == "127.0.0.1")]
    run = start_faulty(*PYTHON_TRAIN, *words, MASTER_PORT=free_port(), **place)
    if number is not None:
        time.sleep(5)  # it waits now, or will
        run.send(number)
    run.finish(code, limit=60)  # not until backend.timeout, 300 s
    assert said in run.output
    assert "Traceback" not in run.output


def test_a_preparation_may_take_longer_than_backend_timeout(start_faulty, tmp_path):
    command = [*LAUNCHERS["torchrun"], *PARTS, "backend=gloo", "backend.timeout=4", "trainer.epochs=1"]
    start_faulty(*command, FAULT="prepare/7:all:1").finish()
    assert not (tmp_path / "in-prepare-1").exists()  # only the first rank of a machine prepares


def test_ranks_that_wait_for_a_preparation_end_with_it(start_faulty, tmp_path):
    run = start_faulty(*LAUNCHERS["torchrun"], *PARTS, "backend=gloo", FAULT="prepare/600:all:1")
    wait_for(lambda: is_at(tmp_path, "prepare"), "preparation")
    environs = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in children(run.process.pid)}
    (rank_zero,) = [pid for pid, environ in environs.items() if b"\0RANK=0\0" in environ]
    os.kill(rank_zero, signal.SIGKILL)
    assert run.finish(code=None, limit=30).process.returncode != 0


READ_BY_WORKERS = [*SLOW, "trainer.epochs=12", *own_data("support.digits.SlowDigits"), "loader.num_workers=2"]
READ_BY_WORKERS += ["trainer.batch_size=8", "snapshot.every=1steps"]


@pytest.mark.parametrize("starter", ["python", "launch=torchrun", "torchrun"])
def test_a_run_with_workers_that_was_stopped_in_mid_epoch_goes_on_to_the_same_bits(start, tmp_path, starter):
    """And its workers end. runs/test_loader_workers.py kills a rank."""
    command, is_ours = [*LAUNCHERS[starter], *READ_BY_WORKERS, "hydra.run.dir=run"], starter != "torchrun"
    run = start(*command)
    wait_for(lambda: position(tmp_path / "run")[0] >= 2, "snapshot")
    run.send(*(signal.SIGINT, "group") if is_ours else (signal.SIGTERM, "launcher"))  # as a terminal does; kill
    run.finish(75 if is_ours else None)
    assert position(tmp_path / "run")[0] == stopped_at(tmp_path / "run") < 96  # all steps
    wait_for(lambda: not processes_of(run.process.pid), "end of all processes", 20)
    if starter == "launch=torchrun":
        start(*command).finish()
        start(*LAUNCHERS["launch=fork"], *READ_BY_WORKERS, "loader.num_workers=0", "hydra.run.dir=whole").finish()
        assert same_bits(tmp_path / "whole", tmp_path / "run")
