"""How a rank that hangs is asked for its stack: by a signal only if its Python threads do not run."""

import os
import signal
import socket
from typing import Any

from lockstep.failures import watchdog
from lockstep.failures.channel import ProgressPage, Reader
from lockstep.failures.reporter import Reporter
from lockstep.failures.watched_rank import WatchedRank
from support.worlds import in_world


def ask_a_rank_that_runs() -> tuple[int, Any, list[str]]:
    """(signals that came, whether it answers, the functions in the stack of the thread that asks)."""
    here, there = socket.socketpair()
    reporter, signals = Reporter(here), []
    reporter.introduce({"rank": 0, "world_size": 1, "pid": os.getpid()})
    signal.signal(signal.SIGUSR2, lambda number, frame: signals.append(number))
    reader = Reader(there)
    (message,) = reader.read()
    page, stacks, asks = reader.descriptors
    rank = WatchedRank(message["hello"], there, reader, ProgressPage(page), stacks, asks)
    watchdog.SIGNAL_AFTER = watchdog.ANSWER_SECONDS = 60.0  # this process may stand still for a second
    (facts,) = watchdog.gather([rank])
    return len(signals), facts.answers, [frame.function for frame in facts.stack.frames]


def test_a_rank_whose_python_threads_run_gets_no_signal() -> None:
    """faulthandler's handler reads frames without the GIL: it crashed a rank while torch's compiler traced a model."""
    ((signals, answers, functions),) = in_world(1, ask_a_rank_that_runs)
    assert (signals, answers) == (0, True)
    assert functions[functions.index("gather") + 1] == "ask_a_rank_that_runs"
