"""How a launcher waits for its ranks while they are asked to stop, and what their exit codes say then."""

import math
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess

from lockstep.distributed.signals import STOP_SIGNALS, Relay, ended_at_once, unanswered_stop, with_newest_snapshot
from lockstep.errors import EXIT_FINISHED, EXIT_KILLED, EXIT_RESUMABLE, EXIT_STOPPED_WITHOUT_SNAPSHOT, StoppedEarly
from lockstep.failures.watched_rank import process_has_ended
from lockstep.launchers.base import RankFailed
from lockstep.launchers.processes import print_line

POLL_SECONDS = 0.5
SECONDS_AFTER_SECOND_SIGNAL = 1.5  # until ranks that have not ended are killed
SECONDS_AFTER_FIRST_RANK = 5.0  # from the end of the first rank in a stop until ranks that have not ended are killed
LONGER_AFTER = {EXIT_FINISHED: math.inf, EXIT_RESUMABLE: 30.0}  # all is well: rank 0 still closes its loggers
SECONDS_AFTER_FORK_SERVER = 30.0  # for ranks to save after the death of their fork server, which asks them to stop
CODE_WITHOUT_FORK_SERVER = 255  # what Python calls the exit code of a process whose fork server has died
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


def fork_server_killed(codes: Sequence[int], pids: Sequence[int]) -> RankFailed | None:
    """The failure of a run whose fork server was killed, once its ranks have ended, too; None if it lives.

    Nobody knows the exit codes of such ranks: Python gives all of them that one code at once, while they still save.
    """
    if CODE_WITHOUT_FORK_SERVER not in codes or not _fork_server_has_ended():
        return None
    deadline = time.monotonic() + SECONDS_AFTER_FORK_SERVER
    waiting = list(pids)
    while waiting and time.monotonic() < deadline:
        time.sleep(0.1)
        waiting = [pid for pid in waiting if not process_has_ended(pid)]
    for pid in waiting:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reason = "the helper process that the ranks are forked from was killed, perhaps because no memory was left"
    return RankFailed(f"lockstep: {with_newest_snapshot(reason)}", {"exit_code": EXIT_KILLED})


def _fork_server_has_ended() -> bool:
    server = getattr(multiprocessing.forkserver, "_forkserver")  # noqa: B009  (mypy does not know it)
    pid: int | None = server._forkserver_pid
    deadline = time.monotonic() + 1.0  # a process closes its files a moment before it has ended
    while pid is not None and time.monotonic() < deadline:
        if process_has_ended(pid):
            return True
        time.sleep(0.02)
    return False


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
