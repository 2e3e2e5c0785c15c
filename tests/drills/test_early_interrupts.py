"""Ctrl-C and a closed terminal before training: while Hydra composes, while torch is imported, also in the helpers.

LOCKSTEP_SIGNALS=all tries both signals under each launcher.
"""

import os
import signal
import sys
import time

import pytest

from support.commands import LAUNCHERS, TRAIN, processes_of, wait_for

pytestmark = pytest.mark.drill

MOMENTS = [0.15, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 1.2, 1.5, 1.8, 2.2]  # seconds after the start
TORCHRUN_MOMENTS = [1.2, 2.4, 3.6]  # torchrun imports torch first, its ranks afterwards
ROWS = [
    *[(signal.SIGINT, words) for words in ([], ["launch=torchrun"], ["launch=spawn"])],
    (signal.SIGHUP, ["launch=fork"]),
]
FOREIGN_ROWS = [(signal.SIGINT, "torchrun")]
if os.environ.get("LOCKSTEP_SIGNALS") == "all":
    WORDS = ([], ["launch=torchrun"], ["launch=spawn"], ["launch=fork"])
    ROWS = [(number, words) for number in (signal.SIGINT, signal.SIGHUP) for words in WORDS]
    TORCHRUN_MOMENTS = [1.2, 1.8, 2.4, 3.0, 3.6, 4.2]
    FOREIGN_ROWS = [(number, name) for number in (signal.SIGINT, signal.SIGHUP) for name in ("torchrun", "mpirun")]


@pytest.mark.parametrize(
    ("number", "words"),
    ROWS,
    ids=lambda value: getattr(value, "name", None) or " ".join(value),
)
def test_an_early_interrupt_ends_the_command_at_once_and_without_a_traceback(start, number, words):
    codes = []
    for moment in MOMENTS:
        run = start(sys.executable, TRAIN, "model=mlp", "trainer.epochs=300", *words)
        time.sleep(moment)
        os.killpg(run.process.pid, number)
        interrupted = time.monotonic()
        run.finish(None)
        assert time.monotonic() - interrupted < 20
        assert "Traceback" not in run.output, f"after {moment} s:\n{run.output}"
        code = run.process.returncode
        codes.append(code if code >= 0 else 128 - code)  # before Python runs a line, the signal itself ends it
    assert codes[0] == 128 + number
    assert set(codes) <= {128 + number, 75, 76}, codes  # the later ones may find a training


@pytest.mark.parametrize(("number", "launcher"), FOREIGN_ROWS, ids=lambda value: getattr(value, "name", value))
def test_under_torchrun_and_mpirun_no_process_stays_after_an_early_interrupt(start, tmp_path, number, launcher):
    """Their words and their exit codes are their own."""
    for moment in TORCHRUN_MOMENTS:
        run = start(*LAUNCHERS[launcher], "model=mlp", "trainer.epochs=300", f"hydra.run.dir={tmp_path}/{moment}")
        time.sleep(moment)
        os.killpg(run.process.pid, number)
        run.finish(None)
        wait_for(lambda: not processes_of(run.process.pid), f"end of all processes, {moment} s", limit=5)  # noqa: B023
