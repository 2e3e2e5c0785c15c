"""The rendezvous: all ranks of a world agree on a part of the store that no earlier process group has used.

torchrun keeps one store over all restarts, and a sweep keeps one over all its jobs. A plain init_process_group then
reads the addresses of ranks that have exited.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from lockstep.distributed.environment import RankInfo
from lockstep.distributed.store import shared_store
from lockstep.errors import RankMissing

SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 1.0  # seconds between two requests to the store
REQUESTS_PER_SECOND = 20_000  # of all ranks together: a TCPStore answers several times as many
PAUSE_SHARE = 0.1  # of the time already waited, so that a rank notices an answer at most 10 % late


def form_group(info: RankInfo, timeout: timedelta) -> Store:
    """The part of the shared store that all ranks of this world have agreed on. Every rank calls it.

    Raises RankMissing for a rank that does not come within `timeout`.
    """
    store = shared_store(info, timeout)
    nonce = agree_on_nonce(store, info.rank, info.world_size, timeout)
    return dist.PrefixStore(f"rendezvous/{nonce}", store)


def agree_on_nonce(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Rank 0 draws a nonce, every rank acknowledges it with a name of its own, and rank 0 confirms each name.

    A rank whose name is not confirmed has read the nonce of an earlier attempt, and waits for the next one. A count of
    restarts cannot replace the nonce: with two torchrun agents the counts differ.
    """
    name = uuid.uuid4().hex
    pause = _Pause(size, timeout)
    if rank == 0:
        return _open_round(store, size, pause)
    return _join_round(store, rank, name, pause)


def _open_round(store: Store, size: int, pause: "_Pause") -> str:
    nonce = uuid.uuid4().hex
    store.set("meet/nonce", nonce)
    names = {}
    for rank in range(1, size):
        names[rank] = _wait_for(store, f"meet/{nonce}/ack/{rank}", pause, f"rank {rank} did not join the rendezvous")
    for rank, name in names.items():
        store.set(f"meet/{nonce}/go/{rank}", name)
    return nonce


def _join_round(store: Store, rank: int, name: str, pause: "_Pause") -> str:
    acknowledged = None
    while True:
        nonce = _wait_for(store, "meet/nonce", pause, "rank 0 did not start the rendezvous")
        if nonce != acknowledged:
            acknowledged = nonce
            store.set(f"meet/{nonce}/ack/{rank}", name)
        confirmed = f"meet/{nonce}/go/{rank}"
        if store.check([confirmed]) and store.get(confirmed).decode() == name:
            return nonce
        pause.sleep(f"rank {rank} found no rendezvous to join")


def _wait_for(store: Store, key: str, pause: "_Pause", complaint: str) -> str:
    # Not store.wait(): torch prints two warnings for each of its timeouts, and Ctrl-C has no effect while it waits.
    while not store.check([key]):
        pause.sleep(complaint)
    return store.get(key).decode()


class _Pause:
    """Sleeps between two requests to the store: the longer a rank has waited already, the longer.

    4096 ranks that asked every 10 ms would send 400,000 requests a second to one store.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        self.start = time.monotonic()
        self.deadline = self.start + timeout.total_seconds()
        self.shortest = max(SHORTEST_PAUSE, size / REQUESTS_PER_SECOND)

    def sleep(self, complaint: str) -> None:
        """Sleep once. Raises RankMissing with `complaint` after the deadline."""
        now = time.monotonic()
        if now > self.deadline:
            raise RankMissing(
                f"{complaint} within backend.timeout; type the same command, with the same world size, on every node"
            )
        pause = min(max(self.shortest, (now - self.start) * PAUSE_SHARE), LONGEST_PAUSE)
        time.sleep(min(pause, max(self.deadline - now, 0) + 0.001))
