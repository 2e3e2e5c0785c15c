"""The ranks of a running command, seen from outside: each has a page in which it notes what it does."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.failures.channel import ProgressPage
from support.commands import ranks_under

PAGE = "/memfd:lockstep-page (deleted)"


def ranks_in(launcher: int, phase: str) -> list[int]:
    """The pids of the ranks that are in `phase` now."""
    return [pid for pid in _processes(launcher) for page in _pages(pid) if page.phase == phase]


def all_ranks(launcher: int) -> list[int]:
    """The pids of the ranks."""
    return [pid for pid in _processes(launcher) for _ in _pages(pid)]


def _processes(launcher: int) -> list[int]:
    """The pids of the ranks; none if a process ends at this moment."""
    with suppress(OSError):
        return ranks_under(launcher)
    return []


def _pages(pid: int) -> Iterator[ProgressPage]:
    """The page in which the rank notes what it does."""
    with suppress(OSError):  # the process has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(file) == PAGE:
                descriptor = os.open(file, os.O_RDWR)
                if os.fstat(descriptor).st_size:  # else the rank has just made it
                    yield ProgressPage(descriptor)
                os.close(descriptor)
                return
