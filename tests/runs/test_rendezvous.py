"""How ranks find each other: nonces, repeated meetings over one store, the run's start time, and what listens where."""

import os
import threading
from datetime import datetime, timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.distributed import rendezvous
from lockstep.distributed.environment import RankInfo, read_rank_info
from lockstep.distributed.rendezvous import agree_on_nonce, form_group, run_started_at, shared_store
from lockstep.distributed.world import join_world
from support.sockets import is_loopback, listening_addresses
from support.worlds import in_world

PATIENCE = timedelta(seconds=20)


def test_a_nonce_of_an_earlier_attempt_is_passed_over_and_a_rank_that_does_not_come_is_named():
    store, found = dist.HashStore(), {}
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


def _meet_three_times():
    info, totals, listening = read_rank_info(), [], set()
    moment = run_started_at(info)  # first, as train.py does: rank 0 takes the store with it when it exits
    for _ in range(3):
        dist.init_process_group("gloo", store=form_group(info, PATIENCE), rank=info.rank, world_size=info.world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        totals.append(total.item())
        listening |= listening_addresses([os.getpid()])
        dist.destroy_process_group()
    return totals, bool(listening) and all(map(is_loopback, listening)), moment.isoformat()


def test_ranks_meet_three_times_over_one_store_share_the_start_time_and_listen_at_loopback():
    (totals, at_loopback, moment), *others = in_world(3, _meet_three_times)
    assert (totals, at_loopback) == ([3.0] * 3, True)
    assert others == [(totals, at_loopback, moment)] * 2


def asked(name):
    """The method `name` of a store, which counts what gloo asks, and not what the ranks ask while they meet."""

    def ask(self, *args):
        self.requests += (args[0] if isinstance(args[0], str) else args[0][0]).startswith("rendezvous/")
        return getattr(self.inner, name)(*args)

    return ask


class AskedStore(dist.Store):
    set, get, wait, multi_get = map(asked, ("set", "get", "wait", "multi_get"))

    def __init__(self, inner):
        super().__init__()
        self.inner, self.requests = inner, 0

    def check(self, keys):
        return self.inner.check(keys)

    def has_extended_api(self):
        return True


def requests_to_meet():
    info = read_rank_info()
    store = rendezvous._stores[info] = AskedStore(shared_store(info))
    with join_world("gloo", 60) as world:
        assert world.all_reduce_sum(torch.ones(1)).item() == world.size
        world.barrier()
    return store.requests


def test_a_rank_asks_the_store_twice_however_large_the_world_is():
    assert in_world(5, requests_to_meet) == [2] * 5


def test_a_requeued_slurm_step_keeps_its_start_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def started(**env):
        monkeypatch.setattr("os.environ", {f"SLURM_{name}": value for name, value in env.items()})
        return run_started_at.__wrapped__(RankInfo(started_by="srun"))

    began = started(JOB_ID="8", STEP_ID="0")
    assert started(JOB_ID="8", STEP_ID="0", RESTART_COUNT="1") == began
    assert started(JOB_ID="8", STEP_ID="1", RESTART_COUNT="1") > began
    assert started(JOB_ID="8", STEP_ID="0") > began  # another job of the same number, years later
    assert datetime.now() - started() < timedelta(seconds=1)
    (tmp_path / "outputs/.started/slurm-8.0").write_text("")  # left by a machine that failed
    assert started(JOB_ID="8", STEP_ID="0", RESTART_COUNT="1") > began
