"""Ctrl-C and a closed terminal before training: while Hydra composes, while torch is imported, also in the helpers."""

import os
import signal
import sys
import time

import pytest

from support.commands import TRAIN

pytestmark = pytest.mark.drill

MOMENTS = [0.15, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 1.2, 1.5, 1.8, 2.2]  # seconds after the start


@pytest.mark.parametrize(
    ("number", "words"),
    [
        *[(signal.SIGINT, words) for words in ([], ["launch=torchrun"], ["launch=spawn"])],
        (signal.SIGHUP, ["launch=fork"]),
    ],
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
