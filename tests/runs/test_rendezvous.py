"""How ranks find each other: nonces, repeated meetings over one store, the run's start time, and what listens where."""

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.distributed import rendezvous
from lockstep.distributed.environment import RankInfo, read_rank_info
from lockstep.distributed.rendezvous import agree_on_nonce, form_group, run_started_at, shared_store, store_address
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from support.sockets import is_loopback, listening_addresses
from support.worlds import in_world

PATIENCE = timedelta(seconds=20)


def test_a_nonce_of_an_earlier_attempt_is_passed_over_and_a_rank_that_does_not_come_is_named():
    store, found = dist.HashStore(), dict[int, str]()
    for key in ("meet/stale/ack/1", "meet/stale/go/1"):
        store.set(key, "an earlier process")
    store.set("meet/nonce", "stale")
    rank = threading.Thread(target=lambda: found.update({1: agree_on_nonce(store, 1, 2, PATIENCE)}), daemon=True)
    rank.start()
    rank.join(0.3)
    assert rank.is_alive()
    nonce = agree_on_nonce(store, 0, 2, PATIENCE)
    rank.join(10)
    assert found == {1: nonce}
    assert nonce != "stale"
    for here, said in enumerate(("rank 1 did not join", "rank 0 did not start")):
        with pytest.raises(TimeoutError, match=f"{said} the rendezvous within backend.timeout"):
            agree_on_nonce(dist.HashStore(), here, 2, timedelta(seconds=0.05))


def _meet_three_times() -> tuple[list[float], str]:
    info, totals = read_rank_info(), []
    moment = run_started_at(info)  # first, as train.py does: rank 0 takes the store with it when it exits
    for _ in range(3):
        dist.init_process_group("gloo", store=form_group(info, PATIENCE), rank=info.rank, world_size=info.world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        totals.append(total.item())
        dist.destroy_process_group()
    return totals, moment.isoformat()


def test_ranks_meet_three_times_over_one_store_and_share_the_start_time():
    answers = in_world(3, _meet_three_times)
    assert [totals for totals, _ in answers] == [[3.0] * 3] * 3
    assert len({moment for _, moment in answers}) == 1


def asked(name: str) -> Callable[..., Any]:
    """The method `name` of a store, which counts what gloo asks, and not what the ranks ask while they meet."""

    def ask(self: Any, *args: Any) -> Any:
        key = args[0] if isinstance(args[0], str) else args[0][0]
        self.requests += key.startswith("rendezvous/")
        return getattr(self.inner, name)(*args)

    return ask


class AskedStore(dist.Store):
    set, get, wait, multi_get = map(asked, ("set", "get", "wait", "multi_get"))

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.requests = inner, 0

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def has_extended_api(self) -> bool:
        return True


def requests_to_meet() -> tuple[int, bool]:
    info = read_rank_info()
    store = AskedStore(shared_store(info))
    rendezvous._stores[info] = store
    with join_world("gloo", 60) as world:
        assert world.all_reduce_sum(torch.ones(1)).item() == world.size
        found = listening_addresses([os.getpid()])
        world.barrier()
    return store.requests, bool(found) and all(map(is_loopback, found))


@pytest.mark.parametrize("size", [2, 5])
def test_a_rank_asks_the_store_as_often_in_a_larger_world_and_listens_at_loopback(size: int) -> None:
    assert in_world(size, requests_to_meet) == [(2, True)] * size


def test_a_requeued_slurm_step_keeps_its_start_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def started(**env: str) -> datetime:
        monkeypatch.setattr("os.environ", {f"SLURM_{name}": value for name, value in env.items()})
        return run_started_at.__wrapped__(RankInfo(started_by="srun"))

    began = started(JOB_ID="8", STEP_ID="0")
    assert started(JOB_ID="8", STEP_ID="0", RESTART_COUNT="1") == began
    assert started(JOB_ID="8", STEP_ID="1", RESTART_COUNT="1") > began
    assert started(JOB_ID="8", STEP_ID="0") > began  # another job of the same number, years later
    assert datetime.now() - started() < timedelta(seconds=1)
    (tmp_path / "outputs/.started/slurm-8.0").write_text("")  # left by a machine that failed
    assert started(JOB_ID="8", STEP_ID="0", RESTART_COUNT="1") > began


def info(**changes: Any) -> RankInfo:
    defaults = {"world_size": 2, "local_world_size": 2, "started_by": "torchrun", "master_addr": "node7"}
    return RankInfo(**(defaults | {"master_port": 29500} | changes))


@pytest.mark.parametrize(
    ("here", "one_machine", "address"),
    [
        (info(), True, "127.0.0.1"),
        (info(started_by="spawn", master_addr="10.0.0.5"), True, "127.0.0.1"),
        (info(agent_store=True), True, "node7"),
        (info(local_world_size=1), False, "node7"),
        (info(started_by="environment"), False, "node7"),  # a starter that does not say how many ranks a machine has
        (info(started_by="mpirun", master_addr="127.0.0.1"), True, "127.0.0.1"),
        (info(started_by="spawn", local_world_size=1, master_addr="10.0.0.5"), False, "10.0.0.5"),
    ],
)
def test_what_is_known_of_the_machines_of_a_world(here: RankInfo, one_machine: bool, address: str) -> None:
    assert (here.on_one_machine, store_address(here)) == (one_machine, address)


@pytest.mark.parametrize(("local", "address"), [(2, "127.0.0.1"), (1, "::")])
def test_the_store_of_one_machine_listens_at_the_loopback_address(local: int, address: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    before = listening_addresses([os.getpid()])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken .* type MASTER_PORT={port + 1}"):
            shared_store(info(master_port=port))
    here = info(master_port=port, local_world_size=local, master_addr=socket.gethostname())
    shared_store(here).set("key", "value")
    assert listening_addresses([os.getpid()]) - before == {f"{address}:{port}"}
    assert shared_store(replace(here, rank=1)).get("key") == b"value"
