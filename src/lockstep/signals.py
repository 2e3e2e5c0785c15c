"""Being asked to stop: a handler only raises a flag; the ranks agree on it at a step, save, and leave together."""

import ctypes
import os
import signal
import time
from contextlib import contextmanager, suppress

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
RESUMABLE = 75  # EX_TEMPFAIL: stopped early with a good snapshot; 0 is for finished runs alone, or Slurm never requeues

_asked = None  # when, by the monotonic clock


class Stopped(BaseException):
    """The run was asked to stop early; its snapshot is written and it can be resumed.

    Like KeyboardInterrupt no Exception: it ends a whole sweep, not one job of it.
    """


def listen():
    """Turn SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) into a wish to stop; asked again, the process ends at once."""
    for number in ASKING:
        signal.signal(number, _ask)


def _ask(number, frame):
    global _asked
    now = time.monotonic()
    if _asked is None:
        _asked = now
    elif number != signal.SIGUSR1 and now - _asked > 2:  # one Ctrl-C can arrive twice, by the terminal and by the launcher
        os._exit(128 + number)


def stop_listening():
    """From here on the end is near and certain: srun sends TERM to all when the first rank leaves, and that must not change an exit code."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)


def stop_asked():
    return _asked is not None


@contextmanager
def passed_on(pids):
    """While the block runs, hand the signals that ask to stop to the processes `pids`, who know how."""

    def hand_on(number, frame):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, hand_on) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent():
    """Have the kernel send SIGTERM when the parent dies: kill -9 of a launcher must leave no orphan training on."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG, Linux alone
    except AttributeError:
        return
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGTERM)
