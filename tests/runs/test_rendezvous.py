"""How ranks find each other, and what listens where; and what launchers leave behind."""

import multiprocessing.util
import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.rendezvous import agree_on_nonce, form_group, run_started_at
from lockstep.distributed.world import join_world
from lockstep.launchers.local import LocalLauncher
from support.commands import wait_for
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


def _sum_of_ranks():
    with join_world("gloo", 30) as world:
        total = world.all_reduce_sum(torch.tensor(float(world.rank))).item()
        return total, os.environ["LOCKSTEP_STARTED_BY"], world.local_size, "x" * 2**20  # more than a pipe holds


def _killed():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with join_world("gloo", 30) as world:
        world.barrier()
        if attempt < 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    return attempt


def _left_behind():
    of_python = threading.active_count()
    for start_method in ("spawn", "fork"):
        assert LocalLauncher(start_method, 2).launch(_sum_of_ranks) == (1.0, start_method, 2, "x" * 2**20)
    assert LocalLauncher("fork", 2, max_restarts=3).launch(_killed) == 3
    left = [name for name in os.listdir(multiprocessing.util.get_temp_dir()) if name.startswith("ranks-")]
    wait_for(lambda: threading.active_count() == of_python, "end of the threads")
    return listening_addresses([os.getpid()]), left


def test_launches_and_restarts_leave_no_port_and_no_thread_behind():
    assert in_world(1, _left_behind) == [(set(), [])]
