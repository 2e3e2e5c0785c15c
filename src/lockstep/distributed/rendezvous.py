"""How ranks find each other: the store that they share, the rendezvous, and when their run started.

The store is torch's: a file where our launcher has started all ranks on one machine, else a TCPStore, which rank 0 or
the program that started the ranks hosts. torchrun keeps one store over all its restarts, so each process group gets a
part of the store that no earlier one has used: a plain init_process_group would read the addresses of ranks that have
exited. No torch at the top: `--cfg job` asks when the run started, and a world of one needs no store for it.
"""

import errno
import os
import socket
import sys
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

BACKLOG = 4096  # ranks that connect at the same time; Linux takes the smaller of this and net.core.somaxconn
STORE_TIMEOUT = timedelta(seconds=300)
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 1.0  # seconds between two requests
PAUSE_SHARE = 0.1  # of the time already waited, so that a process notices an answer at most 10 % late
REQUESTS_PER_SECOND = 20_000  # of all ranks together: a TCPStore answers several times as many
NAME_SECONDS = 20.0  # for a host name to appear: a cluster may register a pod's name after it has started the pod
NOTICE_SECONDS = 5.0  # of silence
TRY_SECONDS = 1.0  # for one connection
NOTES = Path("outputs", ".started")  # when jobs of Slurm started first


class Patience:
    """Waits between two requests until `timeout` seconds are over: the longer it has waited already, the longer.

    4096 ranks that asked every 10 ms would send 400,000 requests a second to one store. size: ranks that ask. torch's
    own waits block in C: a signal has no effect there, and a name that does not exist is tried for five minutes.
    """

    def __init__(self, timeout: timedelta, size: int = 1) -> None:
        self.start = time.monotonic()
        self.deadline = self.start + timeout.total_seconds()
        self.shortest = max(SHORTEST_PAUSE, size / REQUESTS_PER_SECOND)

    @property
    def waited(self) -> float:
        """In seconds."""
        return time.monotonic() - self.start

    def pause(self, complaint: str) -> None:
        """Sleep once. Raises RankMissing with `complaint` if the time is over."""
        left = self.deadline - time.monotonic()
        if left < 0:
            advice = "type the same command, with the same world size, on every node"
            raise RankMissing(f"{complaint} within backend.timeout; {advice}") from None
        time.sleep(min(max(self.shortest, self.waited * PAUSE_SHARE), LONGEST_PAUSE, left + 0.001))

    def value_of(self, store: "Store", key: str, complaint: str) -> str:
        """The value of `key` once another rank has set it."""
        while not store.check([key]):
            self.pause(complaint)
        return store.get(key).decode()


# The store.

_stores: dict[RankInfo, "Store"] = {}


def shared_store(info: RankInfo, timeout: timedelta = STORE_TIMEOUT) -> "Store":
    """The store of the ranks that `info` describes, one for the life of this process. A world of one needs no port.

    timeout: for rank 0 to listen. Raises ConfigError if rank 0 must listen at a port that another program uses, and
    RankMissing.
    """
    if info not in _stores:
        _stores[info] = _open_store(info, timeout)
    return _stores[info]


def _open_store(info: RankInfo, timeout: timedelta) -> "Store":
    import torch.distributed as dist

    if info.store_file:
        return dist.FileStore(info.store_file, info.world_size)
    if not info.master_port:
        return dist.HashStore()
    if info.agent_store or not info.is_rank_zero:
        _wait_until_listening(info, timeout)
        return client_of_store(info, timeout)
    # All ranks here: at the loopback address, whatever name the machine has. torch alone listens at every interface.
    address = store_address(info)
    is_here = address == LOOPBACK
    both = not is_here and socket.has_dualstack_ipv6()
    family, place = socket.AF_INET6 if both else socket.AF_INET, (LOOPBACK if is_here else "", info.master_port)
    try:
        listener = socket.create_server(place, family=family, dualstack_ipv6=both, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"port {info.master_port} is taken by another program; type MASTER_PORT={info.master_port + 1} before the "
            f"command, or launch.master_port={info.master_port + 1}"
        ) from None
    return dist.TCPStore(
        address,
        info.master_port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def client_of_store(info: RankInfo, timeout: timedelta) -> "Store":
    """A connection of its own to a store that listens."""
    import torch.distributed as dist

    address = store_address(info)
    return dist.TCPStore(address, info.master_port, is_master=False, timeout=timeout, wait_for_workers=False)


def store_address(info: RankInfo) -> str:
    """Where ranks find their store. One that the starter hosts stays where the starter says."""
    if not info.agent_store and (info.on_one_machine or is_loopback(info.master_addr)):
        return LOOPBACK
    return info.master_addr


def _wait_until_listening(info: RankInfo, timeout: timedelta) -> None:
    """Wait until a program accepts connections where the store is, `timeout` at most.

    Raises ConfigError if the name of the host is not known, and RankMissing.
    """
    patience, has_noticed, place = Patience(timeout), False, (store_address(info), info.master_port)
    while True:
        try:
            socket.create_connection(place, timeout=TRY_SECONDS).close()
            return
        except OSError as error:
            problem = f"{place[0]}:{place[1]} ({error.strerror or error})"
            is_known = not isinstance(error, socket.gaierror)
            if not is_known and patience.waited > NAME_SECONDS:
                raise ConfigError(
                    f"the host {place[0]} of rank 0 is not known on this machine ({error.strerror}); "
                    f"type MASTER_ADDR=<its name or address> before the command, or launch.master_addr="
                ) from None
        if is_known and not has_noticed and patience.waited > NOTICE_SECONDS:
            has_noticed = True
            with suppress(OSError):
                print(f"lockstep: waits for rank 0 to listen at {problem}", file=sys.stderr, flush=True)
        patience.pause(f"rank 0 does not listen at {problem}")


# The rendezvous.


def form_group(info: RankInfo, timeout: timedelta) -> "Store":
    """The part of the shared store that all ranks of this world have agreed on. Every rank calls it.

    Raises RankMissing for a rank that does not come within `timeout`.
    """
    from torch.distributed import PrefixStore

    store = shared_store(info, timeout)
    if info.store_file:  # each start of the ranks has its own
        return store
    nonce = agree_on_nonce(store, info.rank, info.world_size, timeout)
    return PrefixStore(f"rendezvous/{nonce}", store)


def agree_on_nonce(store: "Store", rank: int, size: int, timeout: timedelta) -> str:
    """Rank 0 draws a nonce, every rank acknowledges it with a name of its own, and rank 0 confirms each name.

    A rank whose name is not confirmed has read the nonce of an earlier attempt, and waits for the next one. A count of
    restarts cannot replace the nonce: with two torchrun agents the counts differ.
    """
    patience = Patience(timeout, size)
    if rank == 0:
        nonce, names = uuid.uuid4().hex, {}
        store.set("meet/nonce", nonce)
        for other in range(1, size):
            complaint = f"rank {other} did not join the rendezvous"
            names[other] = patience.value_of(store, f"meet/{nonce}/ack/{other}", complaint)
        for other, name in names.items():
            store.set(f"meet/{nonce}/go/{other}", name)
        return nonce
    name, acknowledged = uuid.uuid4().hex, None
    while True:
        nonce = patience.value_of(store, "meet/nonce", "rank 0 did not start the rendezvous")
        if nonce != acknowledged:
            acknowledged = nonce
            store.set(f"meet/{nonce}/ack/{rank}", name)
        confirmed = f"meet/{nonce}/go/{rank}"
        if store.check([confirmed]) and store.get(confirmed).decode() == name:
            return nonce
        patience.pause(f"rank {rank} found no rendezvous to join")


# When the run started.


@cache
def run_started_at(info: RankInfo, is_noted: bool = True, timeout: timedelta = STORE_TIMEOUT) -> datetime:
    """When this run started, by rank 0's clock: the same moment on every rank and after every restart by torchrun.

    It is asked before Hydra composes, so all ranks compose the same run folder, however far apart they start.
    is_noted: a job that Slurm requeues finds the moment of its first start in a file. timeout: for rank 0 to come.
    Raises RankMissing.
    """
    if not info.master_port:
        return _first_start() if is_noted and info.started_by == "srun" else datetime.now()
    store = shared_store(info, timeout)
    if info.is_rank_zero:
        store.compare_set("lockstep/started", "", (_first_start() if is_noted else datetime.now()).isoformat())
    patience = Patience(timeout, info.world_size)
    return datetime.fromisoformat(patience.value_of(store, "lockstep/started", "rank 0 did not start the run"))


def forget_start(info: RankInfo) -> None:
    """Remove the note of when this job started: the job is finished, and its step may start another run."""
    note = _note()
    if info.is_rank_zero and note is not None:
        note.unlink(missing_ok=True)


def _first_start() -> datetime:
    """Now; or, in a job that Slurm has requeued, the moment at which it started first."""
    note, now = _note(), datetime.now()
    if note is None:
        return now
    noted = note.read_text() if int(os.environ.get("SLURM_RESTART_COUNT", 0)) and note.exists() else ""
    if noted:  # a machine that fails can leave an empty file
        return datetime.fromisoformat(noted)
    with suppress(OSError):  # then the run folder cannot be created either, and that has a message of its own
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(now.isoformat())
    return now


def _note() -> Path | None:
    """The file of a job of Slurm, whose restarts share its number and nothing else."""
    env = os.environ
    is_slurms = "SLURM_STEP_ID" in env and "SLURM_JOB_ID" in env
    return NOTES / f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}" if is_slurms else None
