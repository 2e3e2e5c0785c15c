"""The key-value store that all ranks share, and the moment at which their run started.

torch is imported inside the functions: `--cfg job` asks when the run started, and a world of one needs no store for it.
"""

import os
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from lockstep.distributed.environment import RankInfo
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_TIMEOUT = timedelta(seconds=300)
NOTES = Path("outputs", ".started")  # start times of jobs whose restarts share only a name

_stores: dict[RankInfo, "Store"] = {}


def shared_store(info: RankInfo) -> "Store":
    """The store of the ranks that `info` describes, one for the life of this process. A world of one needs no port.

    Raises ConfigError if rank 0 must listen at a port that another program uses.
    """
    if info not in _stores:
        _stores[info] = _open_store(info)
    return _stores[info]


def close_store(info: RankInfo) -> None:
    """Close this process's store, with its port and its thread if this process hosts it."""
    _stores.pop(info, None)


def _open_store(info: RankInfo) -> "Store":
    import torch.distributed as dist

    if not info.master_port:
        return dist.HashStore()
    is_host = info.is_rank_zero and not info.agent_store
    try:
        return dist.TCPStore(
            info.master_addr, info.master_port, is_master=is_host, timeout=STORE_TIMEOUT, wait_for_workers=False
        )
    except dist.DistNetworkError as error:
        if is_host and "in use" in str(error):
            raise ConfigError(
                f"port {info.master_port} on {info.master_addr} is taken by another program; type "
                f"MASTER_PORT={info.master_port + 1} before the command, or launch.master_port={info.master_port + 1}"
            ) from None
        raise


@cache
def run_started_at(info: RankInfo) -> datetime:
    """When this run started, by rank 0's clock: the same moment on every rank and after every restart by torchrun.

    It is asked before Hydra composes, so all ranks compose the same run folder, however far apart they start.
    """
    if not info.master_port:
        return datetime.now()
    store = shared_store(info)
    if info.is_rank_zero:
        store.compare_set("lockstep/started", "", _first_start(os.environ).isoformat())
    return datetime.fromisoformat(store.get("lockstep/started").decode())


def forget_start(info: RankInfo) -> None:
    """Remove the note of when this job started: the job is finished, and another one may get its name."""
    note, _ = _start_note(os.environ)
    if info.is_rank_zero and note is not None:
        note.unlink(missing_ok=True)


def _first_start(env: Mapping[str, str]) -> datetime:
    """Now; or, in a restarted job, the moment at which it started first, which is noted in a file."""
    now = datetime.now()
    note, may_be_restart = _start_note(env)
    if note is None:
        return now
    if may_be_restart and note.exists():
        return datetime.fromisoformat(note.read_text())
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
