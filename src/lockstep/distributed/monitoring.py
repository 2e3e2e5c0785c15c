"""Connects a rank to the monitor of its machine."""

import time
import uuid
from pathlib import Path

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.world import World
from lockstep.failures import rank as monitor
from lockstep.failures.start import start_for_rank


def join_monitor(world: World, run_dir: str | Path, timeout: float | None, on_hang: str) -> None:
    """Tell the monitor where the run folder is, and what a hang is. A collective.

    If no launcher has started a monitor, this starts it. timeout, on_hang: see `lockstep.failures.watchdog`.
    """
    if monitor.may_start_monitor():
        name = world.broadcast_json(uuid.uuid4().hex)
        started_by = read_rank_info().started_by
        if world.local_rank == 0:
            start_for_rank(name, started_by, world.size)
        monitor.connect(name, world.rank, world.size, local_rank=world.local_rank)
    monitor.set_run(str(run_dir), str(Path(run_dir) / "logs" / f"rank{world.rank}.log"), clock_ahead(world))
    monitor.watch_for_hangs(timeout, on_hang, world.timeout)


def clock_ahead(world: World) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's, wrong by about the time of a message. A collective."""
    world.barrier()  # all ranks leave it at the same time
    now = time.time()
    return float(now - world.all_gather_json(now)[0])
