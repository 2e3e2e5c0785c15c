"""How ranks find each other: where they listen, the store that they share, when their run started, and the rendezvous.

The store is torch's key-value store. One process hosts it: rank 0, or the program that starts the ranks. torchrun keeps
one store over all restarts, and a sweep keeps one over all its jobs, so each process group gets a part of the store
that no earlier one has used. A plain init_process_group would read the addresses of ranks that have exited.

No torch at the top: `--cfg job` asks when the run started, and a world of one needs no store for it.
"""

import errno
import ipaddress
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from lockstep.distributed.environment import RankInfo
from lockstep.errors import ConfigError, RankMissing

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # ranks that connect at the same time; Linux takes the smaller of this and net.core.somaxconn
STORE_TIMEOUT = timedelta(seconds=300)
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 1.0  # seconds between two requests
PAUSE_SHARE = 0.1  # of the time already waited, so that a process notices an answer at most 10 % late
REQUESTS_PER_SECOND = 20_000  # of all ranks together: a TCPStore answers several times as many
NAME_SECONDS = 20.0  # for a host name to appear: a cluster may register a pod's name after it has started the pod
NOTICE_SECONDS = 5.0  # of silence
TRY_SECONDS = 1.0  # for one connection
NOTES = Path("outputs", ".started")  # start times of jobs whose restarts share only a name, and claims
CLAIM_SECONDS = 60.0  # after this time no run can start in the second of a claim any more


class Patience:
    """Waits between two requests until `timeout` seconds are over: the longer it has waited already, the longer.

    4096 ranks that asked every 10 ms would send 400,000 requests a second to one store. size: ranks that ask. torch's
    own waits block in C: a signal has no effect there, and a name that does not exist is tried for five minutes.
    """

    def __init__(self, timeout: float, size: int = 1) -> None:
        self.start = time.monotonic()
        self.deadline = self.start + timeout
        self.shortest = max(SHORTEST_PAUSE, size / REQUESTS_PER_SECOND)

    @property
    def waited(self) -> float:
        """In seconds."""
        return time.monotonic() - self.start

    def pause(self, problem: Exception) -> None:
        """Sleep once. Raises `problem` if the time is over."""
        left = self.deadline - time.monotonic()
        if left < 0:
            raise problem from None
        time.sleep(min(max(self.shortest, self.waited * PAUSE_SHARE), LONGEST_PAUSE, left + 0.001))

    def value_of(self, store: "Store", key: str, complaint: str) -> str:
        """The value of `key` once another rank has set it. Raises RankMissing with `complaint`."""
        while not store.check([key]):
            self.pause(_rank_missing(complaint))
        return store.get(key).decode()


def _rank_missing(complaint: str) -> RankMissing:
    return RankMissing(
        f"{complaint} within backend.timeout; type the same command, with the same world size, on every node"
    )


# Where this machine listens: at the loopback address if all ranks are here, else where the other machines reach it.


def on_one_machine(info: RankInfo) -> bool:
    """Whether all ranks are known to be on this machine, so that nothing needs to listen beyond it.

    Where the starter need not say how many ranks a machine has, only a loopback address shows it.
    """
    known = info.started_by not in ("environment", "mpirun") or is_loopback(info.master_addr)
    return known and info.local_world_size >= info.world_size


def store_address(info: RankInfo) -> str:
    """Where ranks find their store: on one machine at the loopback address, whatever name the machine has.

    A store that the starter hosts stays where the starter says.
    """
    if not info.agent_store and (on_one_machine(info) or is_loopback(info.master_addr)):
        return LOOPBACK
    return info.master_addr


def is_loopback(address: str) -> bool:
    """Whether `address` is localhost or a number such as 127.0.0.1. A name may mean another address elsewhere."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback_interface() -> str | None:
    """The name of the loopback interface: lo on Linux, lo0 on macOS. None if there is none."""
    present = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in present), None)


def listening_socket(address: str, port: int) -> socket.socket:
    """A TCP socket that listens at `address` alone; at every interface if other machines may reach it elsewhere.

    They may if `address` is a name with several addresses, or one that is a loopback address only on this machine, or
    if no interface here has the address, as behind a forwarded port. Port 0 takes a free one. Raises OSError, with
    EADDRINUSE for a port that another program uses.
    """
    family, host = _own_address(address)
    if host is not None:
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def _own_address(address: str) -> tuple[int, str | None]:
    """(address family, the one number behind `address`). The number is None if all ranks may not share it."""
    if address == "localhost":
        return socket.AF_INET, LOOPBACK
    try:
        infos = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:  # an unknown name: connecting to it fails with an error that says so
        return socket.AF_INET, None
    family, number = min((int(family), str(place[0])) for family, _, _, _, place in infos)
    is_shared = len(infos) == 1 and (is_loopback(address) or not is_loopback(number))
    return family, number if is_shared else None


# The store.

_stores: dict[RankInfo, "Store"] = {}
_held_ports: dict[RankInfo, socket.socket] = {}  # of stores that are not opened yet


def shared_store(info: RankInfo, timeout: timedelta = STORE_TIMEOUT) -> "Store":
    """The store of the ranks that `info` describes, one for the life of this process. A world of one needs no port.

    timeout: for rank 0 to listen. Raises ConfigError if rank 0 must listen at a port that another program uses, or at a
    host that is not known, and RankMissing.
    """
    if info not in _stores:
        _stores[info] = _open_store(info, timeout)
    return _stores[info]


def client_of_store(info: RankInfo, seconds: float) -> "Store":
    """Another connection to the store, which does not wait while a thread uses the first one. seconds: to connect."""
    import torch.distributed as dist

    address, timeout = store_address(info), timedelta(seconds=seconds)
    return dist.TCPStore(address, info.master_port, is_master=False, timeout=timeout, wait_for_workers=False)


def close_store(info: RankInfo) -> None:
    """Close this process's store, with its port and its thread if this process hosts it."""
    _stores.pop(info, None)
    if info in _held_ports:
        _held_ports.pop(info).close()


def hold_port(info: RankInfo) -> RankInfo:
    """`info` with a free port, at which this process listens from now on: no other program can get it meanwhile.

    `shared_store` opens the store there, and `close_store` frees the port. Forked children do not keep it.
    """
    listener = listening_socket(store_address(info), 0)
    os.register_at_fork(after_in_child=listener.close)  # a port that a rank kept would still take connections
    held = replace(info, master_port=listener.getsockname()[1])
    _held_ports[held] = listener
    return held


def _open_store(info: RankInfo, timeout: timedelta) -> "Store":
    import torch.distributed as dist

    if not info.master_port:
        return dist.HashStore()
    address = store_address(info)
    if info.agent_store or not info.is_rank_zero:
        _wait_until_listening(address, info.master_port, timeout.total_seconds())
        return dist.TCPStore(address, info.master_port, is_master=False, timeout=timeout, wait_for_workers=False)
    _wait_until_known(address, timeout.total_seconds())
    try:
        # Without a socket of ours torch listens on every interface, whatever the address.
        listener = _held_ports.pop(info, None) or listening_socket(address, info.master_port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"port {info.master_port} on {address} is taken by another program; type "
            f"MASTER_PORT={info.master_port + 1} before the command, or launch.master_port={info.master_port + 1}"
        ) from None
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _wait_until_known(address: str, timeout: float) -> None:
    """Wait until the name of a host is known, NAME_SECONDS or `timeout` seconds at most. Raises ConfigError."""
    patience = Patience(min(NAME_SECONDS, timeout))
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            patience.pause(
                ConfigError(
                    f"the host {address} of rank 0 is not known on this machine ({error.strerror}); "
                    f"type MASTER_ADDR=<its name or address> before the command, or launch.master_addr="
                )
            )


def _wait_until_listening(address: str, port: int, timeout: float) -> None:
    """Wait until a program accepts connections at `port` of the host `address`, `timeout` seconds at most.

    Raises ConfigError if the name of the host is not known, and RankMissing.
    """
    _wait_until_known(address, timeout)
    patience, has_noticed = Patience(timeout), False
    while True:
        try:
            socket.create_connection((address, port), timeout=TRY_SECONDS).close()
            return
        except OSError as error:
            problem = error.strerror or str(error)
        if not has_noticed and patience.waited > NOTICE_SECONDS:
            has_noticed = True
            with suppress(OSError):
                words = f"lockstep: waits for rank 0 to listen at {address}:{port} ({problem})"
                print(words, file=sys.stderr, flush=True)
        patience.pause(
            RankMissing(
                f"rank 0 does not listen at {address}:{port} within backend.timeout ({problem}); type the same command "
                f"on every node, and MASTER_ADDR=<the host of rank 0> before it"
            )
        )


# The rendezvous.


def form_group(info: RankInfo, timeout: timedelta) -> "Store":
    """The part of the shared store that all ranks of this world have agreed on. Every rank calls it.

    Raises RankMissing for a rank that does not come within `timeout`.
    """
    from torch.distributed import PrefixStore

    store = shared_store(info, timeout)
    nonce = agree_on_nonce(store, info.rank, info.world_size, timeout)
    return PrefixStore(f"rendezvous/{nonce}", store)


def agree_on_nonce(store: "Store", rank: int, size: int, timeout: timedelta) -> str:
    """Rank 0 draws a nonce, every rank acknowledges it with a name of its own, and rank 0 confirms each name.

    A rank whose name is not confirmed has read the nonce of an earlier attempt, and waits for the next one. A count of
    restarts cannot replace the nonce: with two torchrun agents the counts differ.
    """
    patience = Patience(timeout.total_seconds(), size)
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
        patience.pause(_rank_missing(f"rank {rank} found no rendezvous to join"))


# When the run started.


@cache
def run_started_at(info: RankInfo, claim: bool = True, timeout: timedelta = STORE_TIMEOUT) -> datetime:
    """When this run started, by rank 0's clock: the same moment on every rank and after every restart by torchrun.

    It is asked before Hydra composes, so all ranks compose the same run folder, however far apart they start. claim:
    a run that starts in the second of another one gets the next free second, and so a folder of its own.
    timeout: for rank 0 to come. Raises RankMissing.
    """
    if not info.master_port and info.started_by == "srun" and claim:
        return _first_start(os.environ)  # Slurm may have requeued it
    if not info.master_port:
        return _claim_second(datetime.now()) if claim else datetime.now()
    store = shared_store(info, timeout)
    if info.is_rank_zero:
        started = _first_start(os.environ) if claim else datetime.now()
        store.compare_set("lockstep/started", "", started.isoformat())
    patience = Patience(timeout.total_seconds(), info.world_size)
    return datetime.fromisoformat(patience.value_of(store, "lockstep/started", "rank 0 did not start the run"))


def forget_start(info: RankInfo) -> None:
    """Remove the note of when this job started: the job is finished, and another one may get its name."""
    note, _ = _start_note(os.environ)
    if info.is_rank_zero and note is not None:
        note.unlink(missing_ok=True)


def _claim_second(moment: datetime) -> datetime:
    """`moment`, or the first second after it that no other run in this directory has claimed."""
    try:
        NOTES.mkdir(parents=True, exist_ok=True)
        for claim in NOTES.glob("second-*"):
            with suppress(FileNotFoundError):  # another run that starts now has removed it
                if time.time() - claim.stat().st_mtime > CLAIM_SECONDS:
                    claim.unlink()
        while True:
            try:
                (NOTES / f"second-{moment:%Y-%m-%dT%H-%M-%S}").touch(exist_ok=False)
                return moment
            except FileExistsError:
                moment += timedelta(seconds=1)
    except OSError:  # then the run folder cannot be created either, and that has a message of its own
        return moment


def _first_start(env: Mapping[str, str]) -> datetime:
    """Now; or, in a restarted job, the moment at which it started first, which is noted in a file."""
    note, may_be_restart = _start_note(env)
    noted = note.read_text() if note is not None and may_be_restart and note.exists() else ""
    if noted:  # a machine that fails can leave an empty file
        return datetime.fromisoformat(noted)
    now = _claim_second(datetime.now())
    if note is None:
        return now
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(now.isoformat())
    return now


def _start_note(env: Mapping[str, str]) -> tuple[Path | None, bool]:
    """(file, whether this may be a restart) for jobs whose restarts share their name and nothing else.

    These are elastic worlds without the agent's store, which open a new store after each restart, and jobs that Slurm
    requeues. (None, False) for all others.
    """
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")  # "none": torchrun was given no --rdzv-id
    if run_id != "none" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return NOTES / f"torchrun-{quote(run_id, safe='')}", True
    if "SLURM_STEP_ID" in env and "SLURM_JOB_ID" in env:
        restarts = int(env.get("SLURM_RESTART_COUNT", 0))
        return NOTES / f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}", restarts > 0
    return None, False
