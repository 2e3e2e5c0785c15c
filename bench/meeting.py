"""What a meeting of the ranks asks of their store, and how long one store would take for up to 10,000 ranks.

python bench/meeting.py [--quick] [--out=outputs/meeting]

Each rank counts its own requests while it meets the others as in a run: the start time, the rendezvous, and gloo's
connections, also as gloo makes them by itself. Questions whether a key is there yet are counted apart: like the
rendezvous, in which a rank asks again, their number depends on how long a rank waits. The other counts of 2 to 64
ranks, all on this machine, are fitted by a cubic, which is evaluated for 1,000 and 10,000. The rate of one TCPStore is
measured over loopback.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import harness
import torch
import torch.distributed as dist

from lockstep.distributed import rendezvous as stores
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.rendezvous import form_group, run_started_at, shared_store

PATIENCE = timedelta(seconds=300)
WORLDS, QUICK_WORLDS = (2, 4, 8, 16, 32, 64), (2, 3, 4)
PREDICTED = (1_000, 10_000)
STEPS = ("start time", "rendezvous", "gloo's connections", "first all-reduce")
BY_ITSELF = "gloo's connections, by itself"
ASKING = "GLOO_ENABLE_STORE_V2_API"
HAMMERS = 4  # processes that ask one store as fast as they can


@dataclass
class Counts:
    """Requests without questions, questions (check), bytes of the answers."""

    requests: int = 0
    questions: int = 0
    nbytes: int = 0

    def since(self, before: "Counts") -> "Counts":
        earlier = before.requests, before.questions, before.nbytes
        return Counts(self.requests - earlier[0], self.questions - earlier[1], self.nbytes - earlier[2])


class CountedStore(dist.Store):
    """Counts the requests to `inner`."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.counts = inner, Counts()

    def _ask(self, name: str, *args: Any) -> Any:
        self.counts.requests += 1
        return getattr(self.inner, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._answered([self._ask("get", key)])[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def check(self, keys: list[str]) -> bool:
        self.counts.questions += 1
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = PATIENCE) -> None:
        self._ask("wait", keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._ask("compare_set", key, expected, desired))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._answered(self._ask("multi_get", keys))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._ask("multi_set", keys, values)

    def append(self, key: str, value: Any) -> None:
        self._ask("append", key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def _answered(self, values: Sequence[Any]) -> list[bytes]:
        self.counts.nbytes += sum(map(len, values))
        return [bytes(value) for value in values]


def meet() -> dict[str, Counts]:
    """In a rank: what it asked in each step."""
    info, found = read_rank_info(), dict[str, Counts]()
    store = CountedStore(shared_store(info, PATIENCE))
    stores._stores[info] = store  # what `form_group` and `run_started_at` find
    before = Counts()

    def ended(step: str) -> None:
        nonlocal before
        found.setdefault(step, store.counts.since(before))  # of the first meeting
        before = replace(store.counts)

    run_started_at(info)
    ended(STEPS[0])
    for step, asking in ((STEPS[2], "1"), (BY_ITSELF, "0")):
        prefixed = form_group(info, PATIENCE)
        ended(STEPS[1])
        os.environ[ASKING] = asking
        dist.init_process_group("gloo", store=prefixed, rank=info.rank, world_size=info.world_size, timeout=PATIENCE)
        ended(step)
        dist.all_reduce(torch.ones(1000))
        ended(STEPS[3])
        dist.destroy_process_group()
    return found


def hammer(seconds: float) -> float:
    """In a rank: the requests a second of all ranks but rank 0, which hosts the store."""
    info = read_rank_info()
    store = shared_store(info, PATIENCE)
    store.set("key", "0123456789abcdef")
    requests, end = 0, time.perf_counter() + seconds
    while info.rank and time.perf_counter() < end:
        store.check(["key"])
        store.get("key")
        requests += 2
    store.add("done", 1)
    while not info.rank and store.add("done", 0) < info.world_size:
        time.sleep(0.05)  # its thread answers the others
    return requests / seconds


def predicted(worlds: Sequence[int], totals: Sequence[float]) -> list[str]:
    """The cubic through `totals`, by least squares of the relative errors, for the worlds PREDICTED."""
    ranks, wanted = torch.tensor(worlds, dtype=torch.float64), torch.tensor(totals, dtype=torch.float64).clamp(min=1e-9)
    powers = torch.stack([ranks**power for power in range(4)], 1)
    factors = torch.linalg.lstsq(powers / wanted[:, None], torch.ones_like(wanted)[:, None]).solution.flatten().tolist()
    return [f"{sum(factor * size**power for power, factor in enumerate(factors)):,.0f}" for size in PREDICTED]


def main() -> None:
    from support.worlds import in_world  # `harness` has put tests/ on the path

    asked = harness.parse(harness.parser(__doc__, "meeting"))
    worlds = QUICK_WORLDS if asked.quick else WORLDS
    counted = {size: in_world(size, meet) for size in worlds}
    rate = sum(in_world(HAMMERS + 1, hammer, 0.3 if asked.quick else 3.0))
    rows: list[list[object]] = []
    for step in (*STEPS, BY_ITSELF):
        for what in ("requests", "nbytes", "questions"):
            totals = [sum(getattr(rank[step], what) for rank in counted[size]) for size in worlds]
            most = max(getattr(rank[step], what) for rank in counted[worlds[-1]])
            waits = what == "questions" or step == "rendezvous"  # how often depends on how long ranks wait
            rows.append([step, what, *totals, most, *(["", ""] if waits else predicted(worlds, totals))])
    head = [
        "all ranks",
        "",
        *(f"W={size}" for size in worlds),
        "most of a rank",
        *(f"W={size:,}" for size in PREDICTED),
    ]
    text = harness.table(head, rows)
    harness.save(asked.out, "meeting", f"{text}\nA TCPStore on this machine answered {rate:,.0f} requests a second.\n")


if __name__ == "__main__":
    main()
