"""When the silence of the ranks is a hang: how long it may be, and what does not count."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass

import pytest

from lockstep.failures.channel import SIZE, ProgressPage, create_unnamed_file
from lockstep.failures.hang_detector import SHORTEST_SILENCE, HangDetector


@dataclass
class MonitoredProcess:
    """This process, as the monitor sees a rank that never answers."""

    page: ProgressPage
    rank: int = 0
    pid: int = os.getpid()

    hello = {"world_size": 1}


@pytest.fixture
def process():
    process = MonitoredProcess(ProgressPage(create_unnamed_file("page", SIZE)))
    process.page.step_ended(1, 1)
    process.page.enter("train")
    return process


def examined_after(process, rules, seconds):
    """Whether a detector examines the rank when it has been silent for `seconds`."""
    detector, now = HangDetector(*rules), time.monotonic()
    return [detector.silence([process], now + second) for second in range(int(seconds) + 1)][-1] is not None


@pytest.mark.parametrize(
    ("phase", "steps", "timeout", "silent", "examined"),
    [
        ("train", 5, 10.0, 12, True),
        ("train", 5, 10.0, 9, False),
        ("train", 5, 280.0, 278, False),  # more than 80 % of backend.timeout, but typed
        ("train", 5, 280.0, 282, True),
        ("train", 0, 10.0, 12, True),  # the first step: a line says where it is
        ("evaluation", 5, 10.0, 12, True),
        ("snapshot", 5, 10.0, 90, False),
        ("snapshot", 5, 30.0, 238, False),
        ("snapshot", 5, 30.0, 242, True),  # 80 % of backend.timeout
        ("prepare", 0, 10.0, 290, False),
        ("disk", 5, 10.0, 290, False),
        ("disk", 5, 10.0, 302, True),
        ("meeting", 0, 10.0, 1000, False),
        ("end", 5, 10.0, 1000, False),
        ("train", 5, None, SHORTEST_SILENCE - 2, False),
        ("train", 5, None, SHORTEST_SILENCE + 2, True),
    ],
)
def test_how_long_a_rank_may_be_silent(phase, steps, timeout, silent, examined):
    process = MonitoredProcess(ProgressPage(create_unnamed_file("page", SIZE)))
    for step in range(steps):
        process.page.step_ended(1, step + 1)
    process.page.enter(phase)
    assert examined_after(process, (timeout, "stop", 300.0), silent) == examined


def test_a_pause_is_no_silence(process):
    rules = (10.0, "stop", 300.0)
    stopped = subprocess.Popen(["sleep", "1000"])
    process.pid = stopped.pid
    detector, now = HangDetector(*rules), time.monotonic()
    for second in range(9):
        detector.silence([process], now + second)
    stopped.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
    os.waitpid(stopped.pid, os.WUNTRACED)
    for second in range(9, 40):
        detector.silence([process], now + second)
    stopped.send_signal(signal.SIGCONT)
    os.waitpid(stopped.pid, os.WCONTINUED)
    for second in range(40, 48):
        assert detector.silence([process], now + second) is None
    assert any([detector.silence([process], now + second) for second in range(48, 53)])
    stopped.kill()
    stopped.wait()
