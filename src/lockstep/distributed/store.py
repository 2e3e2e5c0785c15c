"""The key-value store that all ranks share, and the moment at which their run started.

torch is imported inside the functions: `--cfg job` asks when the run started, and a world of one needs no store for it.
"""

import errno
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from lockstep.distributed.environment import RankInfo
from lockstep.distributed.listening import listening_socket, store_address
from lockstep.distributed.store_waits import wait_for_key, wait_until_known, wait_until_listening
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

STORE_TIMEOUT = timedelta(seconds=300)
NOTES = Path("outputs", ".started")  # start times of jobs whose restarts share only a name, and claims
CLAIM_SECONDS = 60.0  # after this time no run can start in the second of a claim any more

_stores: dict[RankInfo, "Store"] = {}
_held_ports: dict[RankInfo, socket.socket] = {}  # of stores that are not opened yet


def shared_store(info: RankInfo, timeout: timedelta = STORE_TIMEOUT) -> "Store":
    """The store of the ranks that `info` describes, one for the life of this process. A world of one needs no port.

    timeout: for rank 0 to listen. Raises ConfigError if rank 0 must listen at a port that another program uses, or at a
    host that is not known, and TimeoutError.
    """
    if info not in _stores:
        _stores[info] = _open_store(info, timeout)
    return _stores[info]


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


def host_store(
    address: str, port: int, timeout: timedelta = STORE_TIMEOUT, listener: socket.socket | None = None
) -> "TCPStore":
    """A store in this process, at `listener` or at one as of `listening_socket`. Raises OSError as that does."""
    from torch.distributed import TCPStore

    # Without a socket of ours torch listens on every interface, whatever the address.
    listener = listener or listening_socket(address, port)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _open_store(info: RankInfo, timeout: timedelta) -> "Store":
    import torch.distributed as dist

    if not info.master_port:
        return dist.HashStore()
    address = store_address(info)
    if info.agent_store or not info.is_rank_zero:
        wait_until_listening(address, info.master_port, timeout.total_seconds())
        return dist.TCPStore(address, info.master_port, is_master=False, timeout=timeout, wait_for_workers=False)
    wait_until_known(address, timeout.total_seconds())
    try:
        return host_store(address, info.master_port, timeout, _held_ports.pop(info, None))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"port {info.master_port} on {address} is taken by another program; type "
            f"MASTER_PORT={info.master_port + 1} before the command, or launch.master_port={info.master_port + 1}"
        ) from None


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
        store.compare_set("lockstep/started", "", _first_start(os.environ).isoformat())
    moment = wait_for_key(store, "lockstep/started", timeout.total_seconds(), "rank 0 did not start the run")
    return datetime.fromisoformat(moment)


def _claim_second(moment: datetime) -> datetime:
    """`moment`, or the first second after it that no other run in this directory has claimed."""
    try:
        NOTES.mkdir(parents=True, exist_ok=True)
        for claim in NOTES.glob("second-*"):
            with suppress(FileNotFoundError):  # another run that starts now has removed it
                if time.time() - claim.stat().st_mtime > CLAIM_SECONDS:
                    claim.unlink()
        while not _is_first(NOTES / f"second-{moment:%Y-%m-%dT%H-%M-%S}"):
            moment += timedelta(seconds=1)
    except OSError:  # then the run folder cannot be created either, and that has a message of its own
        pass
    return moment


def _is_first(claim: Path) -> bool:
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def forget_start(info: RankInfo) -> None:
    """Remove the note of when this job started: the job is finished, and another one may get its name."""
    note, _ = _start_note(os.environ)
    if info.is_rank_zero and note is not None:
        note.unlink(missing_ok=True)


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
