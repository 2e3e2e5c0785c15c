"""How a launcher waits for its ranks while they are asked to stop, and what their exit codes say then."""

import math
import multiprocessing.connection
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from lockstep.distributed.signal_relay import Relay
from lockstep.distributed.signals import STOP_SIGNALS, ended_at_once, unanswered_stop
from lockstep.errors import EXIT_FINISHED, EXIT_RESUMABLE, EXIT_STOPPED_WITHOUT_SNAPSHOT, StoppedEarly
from lockstep.launchers.processes import print_line

POLL_SECONDS = 0.5
SECONDS_AFTER_SECOND_SIGNAL = 1.5  # until ranks that have not ended are killed
SECONDS_AFTER_FIRST_RANK = 5.0  # from the end of the first rank in a stop until ranks that have not ended are killed
LONGER_AFTER = {EXIT_FINISHED: math.inf, EXIT_RESUMABLE: 30.0}  # all is well: rank 0 still closes its loggers
STOP_EXITS = (EXIT_RESUMABLE, EXIT_STOPPED_WITHOUT_SNAPSHOT)


def wait_for_ranks(processes: Sequence[BaseProcess], relay: Relay) -> list[int]:
    """Wait until all ranks have ended. Kill those that hang while the others have stopped. Returns their exit codes."""
    waiting = list(processes)
    first_end: float | None = None
    while waiting:
        multiprocessing.connection.wait([process.sentinel for process in waiting], POLL_SECONDS)
        waiting = [process for process in waiting if process.is_alive()]
        now = time.monotonic()
        if len(waiting) < len(processes) and relay.first is not None:
            first_end = first_end or now
        told_twice = relay.second is not None and now - relay.second_at > SECONDS_AFTER_SECOND_SIGNAL
        left_behind = first_end is not None and now - first_end > _seconds_for_others(processes)
        if told_twice or left_behind:
            for process in waiting:
                process.kill()
    return [process.exitcode or 0 for process in processes]


def _seconds_for_others(processes: Sequence[BaseProcess]) -> float:
    """How long the other ranks may take after the end of the first one."""
    codes = [process.exitcode for process in processes if process.exitcode is not None]
    return min(LONGER_AFTER.get(code, SECONDS_AFTER_FIRST_RANK) for code in codes)


def stopped_early(codes: Sequence[int], relay: Relay) -> StoppedEarly | None:
    """What the exit codes of the ranks say about a stop; None if there was none, or if a rank failed.

    Prints the last line of the run where no rank has printed it.
    """
    if relay.second is not None:
        return _printed(ended_at_once(relay.second, in_training=True))
    if any(code in STOP_EXITS for code in codes) and all(code in (EXIT_FINISHED, *STOP_EXITS) for code in codes):
        return StoppedEarly("the ranks stopped early", max(codes))  # rank 0 has printed where
    before_training = [number for number in STOP_SIGNALS if 128 + number in codes]
    if before_training:
        return _printed(ended_at_once(before_training[0], in_training=False))
    if relay.first is not None and any(code in STOP_EXITS for code in codes):
        return _printed(unanswered_stop())
    return None


def _printed(stopped: StoppedEarly) -> StoppedEarly:
    print_line(f"lockstep: {stopped}", sys.stderr)
    return stopped
