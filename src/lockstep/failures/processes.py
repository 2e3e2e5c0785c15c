"""What Linux shows of a process to another one. Elsewhere nothing is known."""

import os
import re
from contextlib import suppress
from pathlib import Path

ENDED = ("", "Z", "X")  # states


def process_state(pid: int) -> str:
    """The state letter of a process: R runs, S sleeps, D waits for the disk, T is stopped, Z has ended; "" is gone."""
    with suppress(OSError):
        # The name of the program stands in parentheses and may contain spaces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def cpu_seconds(pid: int) -> float:
    """The CPU time that the threads of a process have used. Not by /proc/<pid>/stat, which counts 10 ms."""
    seconds = 0.0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread ends
            seconds += int(task.read_text().split()[0]) / 1e9
    return seconds


def children(pid: int) -> list[int]:
    """The processes that any thread of `pid` has started."""
    with suppress(OSError):
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sorted(int(child) for text in lists for child in text.split())
    return []


def oom_counter() -> str:
    """The file in which the kernel counts what it kills for want of memory in the control group of this process; "" if
    there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            paths = [f"/sys/fs/cgroup/{group}/memory.events", "/sys/fs/cgroup/memory.events"]
            if controllers:
                paths = [f"/sys/fs/cgroup/memory/{group}/memory.oom_control"] * ("memory" in controllers.split(","))
            if found := [path for path in paths if os.path.exists(path)]:
                return found[0]
    return ""


def oom_kills(counter: str) -> int:
    """How often it has. counter: of `oom_counter`."""
    with suppress(OSError, IndexError):  # its control group is gone
        return int(re.findall(r"^oom_kill (\d+)", Path(counter or os.devnull).read_text(), re.M)[0])
    return 0
