"""Begins to look after the ranks of a run: they share a folder, and the thread that hears signals looks for hangs."""

import os
import sys
import tempfile
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.distributed import signals
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.rendezvous import client_of_store
from lockstep.distributed.world import World
from lockstep.failures.record import heartbeat
from lockstep.failures.report import FILE, identity, read_report, screen, tell, typed_command
from lockstep.failures.watchdog import Watchdog

if TYPE_CHECKING:
    from torch.distributed import Store

CONNECT_TIME = timedelta(seconds=10)  # to a store, which may be in the process that hangs


def watch(world: World, run_dir: str | Path, timeout: float | None, on_hang: str) -> None:
    """Begin to look after the ranks, see `Watchdog`. A collective, before the first step. Ranks of one machine that
    have no folder in common get one. The report of an earlier start goes."""
    info, before, run_dir = read_rank_info(), read_report(Path(run_dir)), os.path.abspath(run_dir)
    is_launched = heartbeat.folder is not None
    makes = not is_launched and world.local_rank == 0 and world.local_size > 1
    of_ranks = world.all_gather_json([tempfile.mkdtemp(prefix="lockstep-") if makes else "", uuid.uuid4().hex])
    if not is_launched:
        folder = of_ranks[min(world.here)][0]
        heartbeat.share(Path(folder) if os.path.isdir(folder) else None)
    log, before = os.path.join(run_dir, "logs", f"rank{world.rank}.log"), before and identity(before["first"])
    heartbeat.note(run_dir=run_dir, log=log, before=before)
    if world.is_rank_zero:
        with suppress(OSError):
            Path(run_dir, FILE).unlink(missing_ok=True)

    def store() -> "Store":
        from torch.distributed import PrefixStore

        return PrefixStore(f"watchdog/{of_ranks[0][1]}", client_of_store(info, CONNECT_TIME))

    def show(failure: dict[str, Any]) -> None:
        report, prints = tell(heartbeat.folder, typed_command(info.started_by), failure)
        with suppress(OSError, ValueError):  # nobody reads stderr any more
            if report and prints:
                print(screen(report), file=sys.stderr, flush=True)

    printing = None if is_launched else show
    dog = Watchdog(world, store, timeout, on_hang, printing)
    if sys.platform == "linux":  # which shows processes to each other
        signals.each_second(dog.look)
