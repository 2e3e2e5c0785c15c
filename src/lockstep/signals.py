"""Being asked to stop: a handler only raises a flag; the ranks agree on it at a step, save, and leave together."""

import ctypes
import os
import signal

RESUMABLE = 75  # EX_TEMPFAIL: stopped early with a good snapshot; 0 is for finished runs alone, or Slurm never requeues

_asked = False


class Stopped(Exception):
    """The run was asked to stop early; its snapshot is written and it can be resumed."""


def listen():
    """Turn SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) into a wish to stop; a second one ends the process at once."""
    global _asked
    _asked = False
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _ask)


def _ask(number, frame):
    global _asked
    if _asked and number != signal.SIGUSR1:
        os._exit(128 + number)
    _asked = True


def stop_asked():
    return _asked


def end_with_parent():
    """Have the kernel send SIGTERM when the parent dies: kill -9 of a launcher must leave no orphan training on."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG, Linux alone
    except AttributeError:
        return
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGTERM)
