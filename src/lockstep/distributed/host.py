"""What the operating system does for a process: cores, memory, an end together with another process."""

import ctypes
import os
import signal
from pathlib import Path

ENDS_WITH_PARENT = "LOCKSTEP_ENDS_WITH_PARENT"  # in the environment of a training that a notebook has started
PR_SET_PDEATHSIG, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1, -1, -3


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use. macOS has no affinity."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def has_native_bf16() -> bool:
    """Whether the CPU multiplies in bfloat16, as far as Linux tells: avx512_bf16 or amx_bf16 on x86, bf16 on ARM."""
    about = Path("/proc/cpuinfo")
    return not about.exists() or "bf16" in about.read_text()


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, so that the next step need not ask the kernel for it: 3000 page
    faults a step until its thresholds have grown, and always for blocks above 32 MB."""
    _call_c("mallopt", M_MMAP_THRESHOLD, 1 << 30)
    _call_c("mallopt", M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Of glibc, whose free memory is in pieces after large blocks have come and gone: it grows by gigabytes."""
    _call_c("malloc_trim", 0)


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Make the kernel send a signal to this process when its parent dies: kill -9 of a launcher must leave no ranks.
    parent: its process; without it, a parent that has died already is not noticed. It works on Linux alone."""
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
