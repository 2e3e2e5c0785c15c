"""What Linux shows of other processes of this user, and signals to them."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PIPE_SECONDS = 0.01  # until a thread that is about to wait does so


def process_state(pid: int) -> str:
    """The state letter of a process: R runs, S sleeps, D waits for the disk, T is stopped, Z has ended; "" is gone."""
    return _stat(pid)[0]


def parent(pid: int) -> int:
    """The process that has started `pid`, or has taken it over; 0 if `pid` is gone."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the name of the program, "" and "0" for a process that is gone."""
    try:
        # The name of the program stands in parentheses and may contain spaces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() or ["", "0"]
    except OSError:
        return ["", "0"]


def handles_stack_signal(pid: int) -> bool:
    """Whether a process has a handler for SIGUSR2, which ends processes that have none."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)
    return False


def children(pid: int) -> list[int]:
    """The processes that any thread of `pid` has started."""
    with suppress(OSError):
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sorted(int(child) for text in lists for child in text.split())
    return []


def kill_children(pid: int) -> None:
    """End what a rank that hangs has started, such as loader workers that hang with it."""
    for child in children(pid):
        if child != os.getpid():  # the first rank may have started the monitor
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)


def request_stack(pid: int) -> None:
    with suppress(OSError):
        if handles_stack_signal(pid):
            os.kill(pid, signal.SIGUSR2)


def writes_to_pipe(pid: int) -> bool:
    """Whether the main thread of a process waits in a pipe, a moment from now."""
    time.sleep(PIPE_SECONDS)
    return "pipe" in kernel_function(pid)


def kernel_function(pid: int) -> str:
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if name == "0" else name
    return ""
