"""Ctrl-C and a closed terminal before training: while Hydra composes, while torch is imported, also in the helpers.

LOCKSTEP_SIGNALS=all tries both signals under each launcher, at more moments.
"""

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from support.commands import LAUNCHERS, TRAIN, processes_of, skip_without_mpirun, wait_for

pytestmark = [pytest.mark.drill, pytest.mark.new_process]

MOMENTS = [0.15, 0.25, 0.5, 0.9, 1.5, 2.2]  # seconds after the command has its handlers of signals
FOREIGN_MOMENTS = {  # seconds after the start
    "torchrun": [1.2, 3.0],  # it imports torch first, its ranks afterwards
    "mpirun": [0.8, 2.0],
}
ROWS = [
    *[(signal.SIGINT, words) for words in ([], ["launch=torchrun"])],
    *[(signal.SIGHUP, [f"launch={name}"]) for name in ("fork", "spawn")],
]
FOREIGN_ROWS = [(signal.SIGINT, "torchrun"), (signal.SIGHUP, "mpirun")]
if os.environ.get("LOCKSTEP_SIGNALS") == "all":
    WORDS = ([], ["launch=torchrun"], ["launch=spawn"], ["launch=fork"])
    ROWS = [(number, words) for number in (signal.SIGINT, signal.SIGHUP) for words in WORDS]
    MOMENTS = [0.15, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 1.2, 1.5, 1.8, 2.2]
    FOREIGN_ROWS = [(number, name) for number in (signal.SIGINT, signal.SIGHUP) for name in FOREIGN_MOMENTS]
    FOREIGN_MOMENTS = {name: [0.3, 0.6, 1.2, 1.8, 2.4, 3.0, 3.6, 4.2] for name in FOREIGN_MOMENTS}


def handles_signals(pid: int) -> bool:
    """Whether the command has a handler for SIGTERM, the last that it sets; Python itself has none."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize(("number", "words"), ROWS, ids=lambda value: getattr(value, "name", None) or " ".join(value))
def test_an_early_interrupt_ends_the_command_at_once_and_without_a_traceback(start, number, words):
    codes = []
    for moment in MOMENTS:
        run = start(sys.executable, TRAIN, "model=mlp", "trainer.epochs=30000", *words)
        wait_for(partial(handles_signals, run.process.pid), "handler")  # before it, Python shows a traceback
        time.sleep(moment)
        os.killpg(run.process.pid, number)
        interrupted = time.monotonic()
        run.finish(None)
        assert time.monotonic() - interrupted < 20
        assert "Traceback" not in run.output, f"after {moment} s:\n{run.output}"
        codes.append(run.process.returncode)
    assert codes[0] == (130 if number == signal.SIGINT else 76)
    assert set(codes) <= {codes[0], 75, 76}, codes  # the later ones may find a training


@pytest.mark.parametrize(("number", "launcher"), FOREIGN_ROWS, ids=lambda value: getattr(value, "name", value))
def test_under_torchrun_and_mpirun_no_process_stays_after_an_early_interrupt(start, tmp_path, number, launcher):
    """Their words and their exit codes are their own."""
    skip_without_mpirun(launcher)
    for moment in FOREIGN_MOMENTS[launcher]:
        run = start(*LAUNCHERS[launcher], "model=mlp", "trainer.epochs=300", f"hydra.run.dir={tmp_path}/{moment}")
        time.sleep(moment)
        os.killpg(run.process.pid, number)
        run.finish(None)
        assert f'File "{TRAIN}"' not in run.output  # a traceback of a rank's
        wait_for(lambda: not processes_of(run.process.pid), f"end of all processes, {moment} s", limit=20)  # noqa: B023
