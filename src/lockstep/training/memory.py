"""How much memory a rank uses."""

import resource
import sys
from pathlib import Path

import torch

MIB = 2**20


def used_memory(device: torch.device) -> float:
    """In MiB: on a GPU the most that its tensors ever had, on a CPU what the process has now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / MIB
    return peak_memory(device)


def peak_memory(device: torch.device) -> float:
    """In MiB: the most that its tensors on a GPU, or the process on a CPU, ever had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return most / 2**10 if sys.platform == "linux" else most / MIB
