"""What the operating system does for a process: cores, memory, an end together with another process, a folder.

Only Python's own library here: this file runs as a program, too, which ends a torchrun agent (`watch_agent`).
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ENDS_WITH_PARENT = "LOCKSTEP_ENDS_WITH_PARENT"  # in the environment of a training that a notebook has started
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

GRACE_SECONDS = 5  # for a torchrun agent to end by itself
WATCH_SECONDS = 60  # then it has gone on with fresh ranks
LOST_RESENDS = 6  # of the same bytes, each after twice the time of the one before: 12 s and more


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; macOS has no affinity
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_count() -> int:
    """The number of cores that this process may use."""
    return len(usable_cores())


def name_of_machine() -> str:
    """The same for processes that see each other's. Containers of one machine do not."""
    spaces = [os.readlink(path) for path in ("/proc/self/ns/pid", "/proc/self/ns/net") if os.path.exists(path)]
    return " ".join([socket.gethostname(), *spaces])


def has_native_bf16() -> bool:
    """Whether the CPU multiplies in bfloat16, as far as Linux tells: avx512_bf16 or amx_bf16 on x86, bf16 on ARM."""
    about = Path("/proc/cpuinfo")
    return not about.exists() or "bf16" in about.read_text()


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, so that the next step need not ask the kernel for it.

    By default glibc returns it: 3000 page faults a step until its thresholds have grown, and always for blocks above
    32 MB. A sample of the convolution net then costs 1.8 times as much in a batch of 1024 as in one of 512.
    """
    _call_c("mallopt", M_MMAP_THRESHOLD, 1 << 30)
    _call_c("mallopt", M_TRIM_THRESHOLD, 2**31 - 1)


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Make the kernel send a signal to this process when its parent dies: kill -9 of a launcher must leave no ranks.

    parent: its process, if it is known. Without it, a parent that has died already is not noticed. Only Linux can send
    such a signal; elsewhere this does nothing.
    """
    parent = parent or os.getppid()
    if _call_c("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0) and os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), number)


def _call_c(name: str, *numbers: int) -> bool:
    """Call a function of the C library. False if it has none of this name: another system's, or another library."""
    try:
        getattr(ctypes.CDLL(None), name)(*numbers)
    except (AttributeError, OSError, TypeError):
        return False
    return True


def remove_temporary_folder() -> None:
    """Remove the folder of multiprocessing. Call it when nothing is left of this process to do but to exit."""
    from lockstep.compat import multiprocessing_folder  # not at the top: as a program this file has no package

    folder = multiprocessing_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def start_agent_watchdog(env: Mapping[str, str]) -> None:
    """Start a watchdog for the torchrun agent that is the parent of this process, if the world has several machines.

    It ends an agent that waits for a machine which no longer answers. TCP alone would give up after 15 minutes. It is a
    process of its own: only that outlives the rank, and only the agent's own user, or root, may end the agent.
    """
    in_torchrun = {"TORCHELASTIC_RUN_ID", "RANK", "LOCAL_WORLD_SIZE"} <= env.keys()  # one alone is left by a script
    if in_torchrun and env.get("LOCAL_RANK") == "0" and env["LOCAL_WORLD_SIZE"] != env.get("WORLD_SIZE"):
        command = [sys.executable, __file__, str(os.getppid())]
        subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def has_lost_connection(pid: int) -> bool:
    """Whether a TCP connection of process `pid` resends to a host that does not answer, by Linux' /proc/net/tcp."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(descriptor))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            timer, resends, inode = columns[5], int(columns[6], 16), columns[9]
            if timer.startswith("01:") and resends >= LOST_RESENDS and f"socket:[{inode}]" in sockets:
                return True
    return False


def watch_agent(agent: int) -> None:
    """Watch the process `agent` for a while, and kill it if its connection is lost."""
    time.sleep(GRACE_SECONDS)
    end = time.monotonic() + WATCH_SECONDS
    with suppress(OSError):  # no /proc/<agent>: the agent has ended, or this is not Linux
        while time.monotonic() < end:
            if has_lost_connection(agent):
                print("lockstep: torchrun waits for a node that no longer answers; ended it here", file=sys.stderr)
                os.kill(agent, signal.SIGKILL)
                return
            time.sleep(0.5)


if __name__ == "__main__":
    watch_agent(int(sys.argv[1]))
