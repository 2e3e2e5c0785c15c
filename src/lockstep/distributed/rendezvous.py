"""How ranks find each other: the store that they share, the rendezvous, and when their run started.

torchrun keeps one store over all its restarts, so each process group gets a part of the store that no earlier one has
used: a plain init_process_group would read the addresses of ranks that have exited. No torch at the top.
"""

import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.distributed.environment import LOOPBACK, RankInfo, is_loopback
from lockstep.errors import ConfigError, RankMissing

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_TIMEOUT = timedelta(seconds=300)
NAME_SECONDS = 20.0  # for a host name to appear: a cluster may register a pod's name after it has started the pod
LONGEST_PAUSE = 1.0  # seconds between two questions
TOO_LATE = "within backend.timeout; type the same command, with the same world size, on every node"
REQUESTS_PER_SECOND = 5_000  # of all ranks together: a TCPStore answers many times as many

_stores: dict[RankInfo, "Store"] = {}  # one for the life of this process


def shared_store(info: RankInfo, timeout: timedelta = STORE_TIMEOUT) -> "Store":
    """The store of the ranks that `info` describes. timeout: for rank 0 to listen. Raises ConfigError if rank 0 must
    listen at a port that another program uses, and RankMissing."""
    import torch.distributed as dist

    address, port = store_address(info), info.master_port
    if info in _stores:
        store: Store = _stores[info]
    elif info.store_file:
        store = dist.FileStore(info.store_file, info.world_size)
    elif not port:
        store = dist.HashStore()
    elif info.agent_store or info.rank > 0:
        _wait_until_listening(address, port, timeout.total_seconds())
        store = client_of_store(info, timeout)
    else:
        try:
            # All ranks here: at the loopback address, whatever name the machine has. torch listens at each interface.
            listener = socket.create_server((LOOPBACK, port)).detach() if address == LOOPBACK else None
            store = dist.TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener)
        except (OSError, dist.DistNetworkError) as error:
            what = f"port {port} is taken or not to be had ({str(error).splitlines()[0]})"
            advice = f"type MASTER_PORT={port + 1} before the command, or launch.master_port={port + 1}"
            raise ConfigError(f"{what}; {advice}") from None
    _stores[info] = store
    return store


def client_of_store(info: RankInfo, timeout: timedelta) -> "Store":
    """A connection of its own to a store that listens."""
    from torch.distributed import TCPStore

    return TCPStore(store_address(info), info.master_port, is_master=False, timeout=timeout, wait_for_workers=False)


def store_address(info: RankInfo) -> str:
    """Where ranks find their store. One that the starter hosts stays where the starter says."""
    is_here = not info.agent_store and (info.on_one_machine or is_loopback(info.master_addr))
    return LOOPBACK if is_here else info.master_addr


def _wait_until_listening(address: str, port: int, seconds: float) -> None:
    """torch's own wait blocks in C, where a launcher hears no signal, and tries an unknown name until its end."""
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((address, port), timeout=LONGEST_PAUSE).close()
            return
        except OSError as error:
            limit = min(NAME_SECONDS, seconds) if isinstance(error, socket.gaierror) else seconds
            if time.monotonic() - start > limit:
                what = f"rank 0 does not listen at {address}:{port} ({error.strerror or error})"
                where = "with the address of rank 0's host as MASTER_ADDR or launch.master_addr"
                raise RankMissing(f"{what}; type the same command on every node, {where}") from None
        time.sleep(LONGEST_PAUSE / 10)


def form_group(info: RankInfo, timeout: timedelta) -> "Store":
    """The part of the shared store that all ranks have agreed on. Every rank calls it. Raises RankMissing."""
    from torch.distributed import PrefixStore

    store = shared_store(info, timeout)
    if info.store_file:  # each start of the ranks has its own
        return store
    nonce = agree_on_nonce(store, info.rank, info.world_size, timeout)
    return PrefixStore(f"rendezvous/{nonce}", store)


def agree_on_nonce(store: "Store", rank: int, size: int, timeout: timedelta) -> str:
    """Rank 0 draws a nonce, every rank acknowledges it with a name of its own, and rank 0 confirms each name. A rank
    whose name is not confirmed has read the nonce of an earlier attempt, and waits for the next one. A count of
    restarts cannot replace the nonce: with two torchrun agents the counts differ."""
    start, deadline = time.monotonic(), time.monotonic() + timeout.total_seconds()
    if rank == 0:
        nonce = uuid.uuid4().hex
        store.set("meet/nonce", nonce)
        names = [
            _value_of(store, f"meet/{nonce}/ack/{other}", deadline, f"rank {other} did not join the rendezvous")
            for other in range(1, size)
        ]
        for other, name in enumerate(names, start=1):
            store.set(f"meet/{nonce}/go/{other}", name)
        return nonce
    name, seen = uuid.uuid4().hex, ""
    while time.monotonic() < deadline:
        nonce = _value_of(store, "meet/nonce", deadline, "rank 0 did not start the rendezvous")
        if nonce != seen:
            store.set(f"meet/{nonce}/ack/{rank}", name)
            seen = nonce
        confirmed = f"meet/{nonce}/go/{rank}"
        if store.check([confirmed]) and store.get(confirmed).decode() == name:
            return nonce
        time.sleep(min(max(size / REQUESTS_PER_SECOND, (time.monotonic() - start) / 10), LONGEST_PAUSE))
    raise RankMissing(f"rank {rank} found no rendezvous to join {TOO_LATE}")


def _value_of(store: "Store", key: str, deadline: float, complaint: str) -> str:
    """The value of `key` once another rank has set it. Raises RankMissing with `complaint`."""
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except DistStoreError:
        raise RankMissing(f"{complaint} {TOO_LATE}") from None
    return store.get(key).decode()


@cache
def run_started_at(info: RankInfo, is_noted: bool = True, timeout: timedelta = STORE_TIMEOUT) -> datetime:
    """When this run started, by rank 0's clock: the same moment on every rank and after every restart by torchrun, so
    all compose the same run folder. is_noted: a job that Slurm requeues finds its first start in a file. Raises
    RankMissing."""
    now, job, step = datetime.now(), os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    if is_noted and info.rank == 0 and job and step:  # a job that is requeued keeps its number, and nothing else
        note = Path("outputs", ".started", f"slurm-{job}.{step}")
        with suppress(OSError, ValueError):  # none; or an empty one, which a machine that fails can leave
            if int(os.environ.get("SLURM_RESTART_COUNT", 0)):
                now = datetime.fromisoformat(note.read_text())
        with suppress(OSError):  # then the run folder cannot be created either, and that has a message of its own
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(now.isoformat())
    if not info.master_port:
        return now
    store = shared_store(info, timeout)
    if info.rank == 0:
        store.compare_set("lockstep/started", "", now.isoformat())
    deadline = time.monotonic() + timeout.total_seconds()
    return datetime.fromisoformat(_value_of(store, "lockstep/started", deadline, "rank 0 did not start the run"))
