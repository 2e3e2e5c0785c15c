"""The ranks of a run with launch.recover=live, as the test sees them from outside."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.monitor.progress_page import ProgressPage
from support.commands import ranks_under, wait_for
from support.run_folders import read_log

RECOVERED = "the ranks are complete again"
PAGE = "/memfd:lockstep-page (deleted)"


def ranks_in(launcher: int, phase: str) -> list[int]:
    """The pids of the ranks that are in `phase` now. A spare is in no phase."""
    return [pid for pid in _processes(launcher) for page in _pages(pid) if page.phase == phase]


def all_ranks(launcher: int) -> list[int]:
    """The pids of the ranks, without the spare."""
    return [pid for pid in _processes(launcher) for _ in _pages(pid)]


def rank_zero(folder: Path) -> int:
    """The pid of rank 0, which has written it into the folder's lock."""
    while not (found := re.match(r"pid (\d+)", (folder / ".lock").read_text())):
        time.sleep(0.001)  # a new rank 0 has emptied the file, and has not written its pid yet
    return int(found[1])


def wait_for_spare(launcher: int) -> None:
    """Until the spare has loaded its data: it takes no CPU time any more."""

    def cpu_times() -> dict[int, list[str]]:
        spares = set(_processes(launcher)) - set(all_ranks(launcher))
        with suppress(OSError):
            return {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in spares}
        return {}

    def is_idle() -> bool:
        before = cpu_times()
        time.sleep(0.5)
        return bool(before) and cpu_times() == before

    wait_for(is_idle, "spare that is ready")


def recoveries(folder: Path) -> int:
    return read_log(folder).count(RECOVERED) if (folder / "train.log").exists() else 0


def pauses(folder: Path) -> list[float]:
    """Seconds from each death that was seen to the end of the first step after it."""
    return [float(seconds) for seconds in re.findall(rf"{RECOVERED}.* ended (.*) s after", read_log(folder))]


def lost_pids(folder: Path) -> set[int]:
    """Of the killed ranks that the log names."""
    return {int(pid) for pid in re.findall(r"rank \d+ \(pid (\d+), exit -9\)", read_log(folder))}


def _processes(launcher: int) -> list[int]:
    """The pids of the ranks and the spare; none if a process ends at this moment."""
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
