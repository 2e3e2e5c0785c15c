"""How a rank that is silent is asked for its stack, by a signal only if its Python threads do not run; what is said."""

import io
import os
import signal
import socket
import time
from contextlib import redirect_stderr
from typing import Any

from lockstep.failures import hang_detector
from lockstep.failures.channel import ProgressPage, Reader
from lockstep.failures.monitored_rank import MonitoredRank
from lockstep.failures.reporter import Reporter
from support.worlds import in_world


def monitored_rank() -> MonitoredRank:
    """This process, as a monitor sees it."""
    here, there = socket.socketpair()
    Reporter(here).introduce({"rank": 0, "world_size": 1, "pid": os.getpid()})
    reader = Reader(there)
    (message,) = reader.read()
    page, *files = reader.descriptors
    hang_detector.SIGNAL_AFTER = hang_detector.PROBE_SECONDS = 60.0  # this process may stand still for a second
    return MonitoredRank(message["hello"], there, reader, ProgressPage(page), *files)


def ask_a_rank_that_runs() -> tuple[int, list[str]]:
    """(signals that came, the functions in the stack of the thread that is asked)."""
    rank, signals = monitored_rank(), []
    signal.signal(signal.SIGUSR2, lambda number, frame: signals.append(number))
    (facts,) = hang_detector.gather([rank])
    return len(signals), [frame.function for frame in facts.stack.frames]


def test_a_rank_whose_python_threads_run_gets_no_signal() -> None:
    """faulthandler's handler reads frames without the GIL: it crashed a rank while torch's compiler traced a model."""
    ((signals, functions),) = in_world(1, ask_a_rank_that_runs)
    assert signals == 0
    assert functions[functions.index("gather") + 1] == "ask_a_rank_that_runs"


def examine_a_slow_first_step() -> tuple[Any, str]:
    """(the diagnosis, what two examinations print) of a rank that waits for no other and has not ended a step."""
    rank = monitored_rank()
    rank.page.enter("train")
    time.sleep(0.2)
    detector = hang_detector.HangDetector(timeout=None, on_hang="stop", backend_timeout=0.2)
    with redirect_stderr(io.StringIO()) as printed:
        diagnoses = [detector.examine([rank]) for _ in range(2)]
    return diagnoses, printed.getvalue()


def test_a_slow_first_step_is_told_once_with_its_line() -> None:
    ((diagnoses, printed),) = in_world(1, examine_a_slow_first_step)
    assert diagnoses == [None, None]
    assert printed.count("and the run goes on: rank 0 is in user code") == 1
    assert "test_rank_probe.py:" in printed
