"""How a rank that hangs is asked for its stack: by a signal only if its Python threads do not run."""

import os
import signal
from types import SimpleNamespace
from typing import Any

from lockstep.failures import rank as rank_probe
from lockstep.failures import watchdog as hang_evidence
from lockstep.failures.channel import ProgressPage, create_page_file, create_unnamed_file
from support.worlds import in_world


def ask_a_rank_that_runs() -> tuple[int, Any, list[str]]:
    """(signals that came, whether it answers, the functions in the stack of the thread that asks)."""
    stacks, signals = create_unnamed_file("stacks"), []
    main_thread, (asks, _) = rank_probe.install(stacks)
    signal.signal(signal.SIGUSR2, lambda number, frame: signals.append(number))
    page = ProgressPage(create_page_file())
    rank: Any = SimpleNamespace(rank=0, pid=os.getpid(), asks=asks, stacks=stacks, main_thread=main_thread, page=page)
    hang_evidence.SIGNAL_AFTER = hang_evidence.ANSWER_SECONDS = 60.0  # this process may stand still for a second
    (facts,) = hang_evidence.gather([rank])
    return len(signals), facts.answers, [frame.function for frame in facts.stack.frames]


def test_a_rank_whose_python_threads_run_gets_no_signal() -> None:
    """faulthandler's handler reads frames without the GIL: it crashed a rank while torch's compiler traced a model."""
    ((signals, answers, functions),) = in_world(1, ask_a_rank_that_runs)
    assert (signals, answers) == (0, True)
    assert functions[functions.index("gather") + 1] == "ask_a_rank_that_runs"
