"""How ranks find each other: nonces, polling, repeated meetings over one store, the run's start time."""

import threading
from datetime import datetime, timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.distributed import rendezvous as store_module
from lockstep.distributed.environment import RankInfo, read_rank_info
from lockstep.distributed.rendezvous import agree_on_nonce, form_group, run_started_at
from lockstep.distributed.world import join_world
from support.worlds import in_world

PATIENCE = timedelta(seconds=20)


class AskedStore(dist.Store):
    """Counts what gloo asks, and not what the ranks ask while they wait for each other."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.requests = inner, 0

    def _ask(self, name: str, *args: Any) -> Any:
        key = args[0] if isinstance(args[0], str) else args[0][0]
        self.requests += key.startswith("rendezvous/")
        return getattr(self.inner, name)(*args)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def wait(self, keys: list[str], timeout: timedelta = PATIENCE) -> None:
        self._ask("wait", keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [bytes(value) for value in self._ask("multi_get", keys)]

    def has_extended_api(self) -> bool:
        return True


def join_in_threads(store: Any, ranks: list[int], size: int) -> tuple[list[threading.Thread], dict[int, str]]:
    """Threads that play these ranks at the meeting, and what nonce each of them finds."""
    found: dict[int, str] = {}

    def join(rank: int) -> None:
        found[rank] = agree_on_nonce(store, rank, size, PATIENCE)

    threads = [threading.Thread(target=join, args=[rank], name=f"rank{rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads, found


def test_a_nonce_of_an_earlier_attempt_is_passed_over():
    store = dist.HashStore()
    store.set("meet/nonce", "stale")
    store.set("meet/stale/ack/1", "an earlier process")
    store.set("meet/stale/go/1", "an earlier process")
    threads, found = join_in_threads(store, [1], 2)
    threads[0].join(0.3)
    assert threads[0].is_alive()
    nonce = agree_on_nonce(store, 0, 2, PATIENCE)
    threads[0].join(10)
    assert found == {1: nonce}
    assert nonce != "stale"


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(TimeoutError, match="rank 1 did not join the rendezvous within backend.timeout"):
        agree_on_nonce(dist.HashStore(), 0, 2, timedelta(seconds=0.05))
    with pytest.raises(TimeoutError, match="rank 0 did not start the rendezvous within backend.timeout"):
        agree_on_nonce(dist.HashStore(), 1, 2, timedelta(seconds=0.05))


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


def requests_to_meet() -> int:
    info = read_rank_info()
    store = AskedStore(store_module.shared_store(info))
    store_module._stores[info] = store
    with join_world("gloo", 60) as world:
        assert world.all_reduce_sum(torch.ones(1)).item() == world.size
    return store.requests


def test_a_rank_asks_the_store_as_often_in_a_larger_world():
    assert in_world(2, requests_to_meet) == [2, 2]
    assert in_world(5, requests_to_meet) == [2] * 5


def test_a_requeued_slurm_step_keeps_its_start_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def first_start(env: dict[str, str]) -> datetime:
        monkeypatch.setattr("os.environ", env)
        return store_module._first_start()

    step = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0"}
    began = first_start(step)
    assert first_start(step | {"SLURM_RESTART_COUNT": "1"}) == began
    assert first_start(step | {"SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "1"}) > began
    assert first_start(step) > began  # another job of the same number, years later
    assert datetime.now() - first_start({}) < timedelta(seconds=1)
    (tmp_path / "outputs/.started/slurm-8.0").write_text("")  # left by a machine that failed
    assert first_start(step | {"SLURM_RESTART_COUNT": "1"}) > began


def test_a_requeued_step_of_one_task_keeps_its_start_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"})
    one_task = RankInfo(started_by="srun")
    began = run_started_at.__wrapped__(one_task)
    assert run_started_at.__wrapped__(one_task) == began
