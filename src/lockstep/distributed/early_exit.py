"""A rank that exits before the end of the training has failed, whatever its exit code."""

import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lockstep.errors import EXIT_KILLED


class LeftEarly(Exception):
    """User code ended this rank in mid-run. Its cause is the SystemExit, whose traceback ends at the user's line."""


def _how(error: SystemExit) -> str:
    return error.code if isinstance(error.code, str) else f"exit code {error.code or 0}"


@contextmanager
def exits_before_ranks_are_failures() -> Iterator[None]:
    """In the process that starts ranks, or before a rank meets the others: SystemExit becomes LeftEarly."""
    try:
        yield
    except SystemExit as error:
        raise LeftEarly(f"the command left before the training: {_how(error)}") from error


@contextmanager
def exits_are_failures() -> Iterator[None]:
    """Inside the block sys.exit, SystemExit and os._exit raise LeftEarly in this process, not in forked ones.

    In another thread than the main one, os._exit shows the stack and ends the process with EXIT_KILLED.
    """
    leave, rank = os._exit, os.getpid()

    def leave_rank(status: int) -> NoReturn:
        if os.getpid() != rank:
            leave(status)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
        traceback.print_stack()
        print(f"lockstep: a thread called os._exit({status}) before the end of the training, see above", flush=True)
        leave(EXIT_KILLED)

    os._exit = leave_rank
    try:
        yield
    except SystemExit as error:
        raise LeftEarly(f"this rank left before the end of the training: {_how(error)}") from error
    finally:
        os._exit = leave
