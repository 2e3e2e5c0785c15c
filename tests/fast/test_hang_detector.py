"""When the silence of the ranks is a hang: how long it may be, and what does not count."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass

import pytest

from lockstep.failures.channel import SIZE, ProgressPage, create_unnamed_file
from lockstep.failures.verdict import RankFacts
from lockstep.failures.watchdog import SHORTEST_SILENCE, Watchdog


@dataclass
class WatchedProcess:
    """This process, as the monitor sees a rank that never answers."""

    page: ProgressPage
    stacks: int
    rank: int = 0
    pid: int = os.getpid()
    asks: int | None = None
    main_thread: str | None = None


@pytest.fixture
def watched():
    process = WatchedProcess(ProgressPage(create_unnamed_file("page", SIZE)), create_unnamed_file("stacks"))
    process.page.step_ended(1, 1)
    process.page.enter("train")
    return process


def examined_after(watched, rules, seconds):
    """Whether a detector asks the rank when it has been silent for `seconds`."""
    detector, now = Watchdog(*rules), time.monotonic()
    for second in range(int(seconds) + 1):
        detector.check([watched], 1, now + second)
    return detector.examination is not None


@pytest.mark.parametrize(
    ("phase", "steps", "timeout", "silent", "examined"),
    [
        ("train", 5, 10.0, 12, True),
        ("train", 5, 10.0, 9, False),
        ("train", 5, 280.0, 278, False),  # more than 80 % of backend.timeout, but typed
        ("train", 5, 280.0, 282, True),
        ("train", 0, 10.0, 90, False),  # the first step
        ("train", 0, 10.0, 102, True),
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
    watched = WatchedProcess(ProgressPage(create_unnamed_file("page", SIZE)), create_unnamed_file("stacks"))
    for step in range(steps):
        watched.page.step_ended(1, step + 1)
    watched.page.enter(phase)
    assert examined_after(watched, (timeout, "stop", 300.0), silent) == examined


def test_a_pause_is_no_silence(watched):
    rules = (10.0, "stop", 300.0)
    stopped = subprocess.Popen(["sleep", "1000"])
    watched.pid = stopped.pid
    detector, now = Watchdog(*rules), time.monotonic()
    for second in range(9):
        detector.check([watched], 1, now + second)
    stopped.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
    os.waitpid(stopped.pid, os.WUNTRACED)
    for second in range(9, 40):
        detector.check([watched], 1, now + second)
    stopped.send_signal(signal.SIGCONT)
    os.waitpid(stopped.pid, os.WCONTINUED)
    for second in range(40, 48):
        detector.check([watched], 1, now + second)
    assert detector.examination is None
    for second in range(48, 53):
        detector.check([watched], 1, now + second)
    assert detector.examination is not None
    detector.examination.join()
    stopped.kill()
    stopped.wait()


def test_an_examination_that_fails_leaves_no_old_facts(watched):
    detector, now = Watchdog(10.0, "stop", 300.0), time.monotonic()
    detector.facts = [RankFacts(0, 1, "Z", "train", 5, 60.0)]
    watched.stacks = -1  # as of a rank of the attempt before
    detector.check([watched], 1, now - 4)
    for second in range(12):
        assert detector.check([watched], 1, now + second) is None
    assert detector.facts == []
