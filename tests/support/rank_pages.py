"""The ranks of a running command, seen from outside: each notes in a file what it does."""

import re
from contextlib import suppress
from pathlib import Path

from lockstep.failures.record import read_place
from support.commands import ranks_under

NOTE = re.compile(r" (/\S+)/rank(\d+)\.at$", re.MULTILINE)


def ranks_in(launcher: int, phase: str) -> list[int]:
    """The pids of the ranks that are in `phase` now."""
    found = []
    for pid in all_ranks(launcher):
        with suppress(OSError):  # the process has ended
            note = NOTE.search(Path(f"/proc/{pid}/maps").read_text())
            if note and read_place(Path(note[1]), int(note[2])).name == phase:
                found.append(pid)
    return found


def all_ranks(launcher: int) -> list[int]:
    """The pids of the ranks; none if a process ends at this moment."""
    with suppress(OSError):
        return ranks_under(launcher)
    return []
