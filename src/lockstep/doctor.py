"""What this machine can do: `lockstep doctor` and `make doctor`. One screen: what works, what is slow, what to type."""

import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.distributed.host import cpu_count, has_native_bf16
from lockstep.runs.record import versions
from lockstep.text import aligned

RANKS = 2
NUMBERS = 2**20  # of a sum over the ranks
FEW_FILES = 1024
SMALL_SHARED_MEMORY = 2**30  # bytes
SLOW_NAME = 1.0  # seconds
GIB = 2**30


class Finding(NamedTuple):
    """advice: what to type, empty if all is well. fails: whether training does not work without."""

    what: str
    found: str
    advice: str = ""
    fails: bool = False


def findings() -> Iterator[Finding]:
    """One row each. torch is imported for the later ones."""
    yield Finding("versions", ", ".join(f"{name} {version}" for name, version in versions().items()))
    yield from _cores()
    yield _bf16()
    yield from _gpus()
    yield from _limits()
    yield _names()
    yield _sum()


def _cores() -> Iterator[Finding]:
    usable, all_cores = cpu_count(), os.cpu_count() or 1
    found = f"{usable} of {all_cores}" if usable < all_cores else str(usable)
    yield Finding("cores", f"{found}; {usable} ranks get one each: launch.nproc_per_node={usable}")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and threads.isdigit() and int(threads) * RANKS > usable:
        yield Finding("threads", f"OMP_NUM_THREADS={threads} a rank", "unset OMP_NUM_THREADS: ranks share the cores")


def _bf16() -> Finding:
    if has_native_bf16():
        return Finding("bf16", "this CPU multiplies in bfloat16")
    return Finding("bf16", "not in this CPU: about 8 times slower than fp32 there", "trainer.precision=fp32 on CPUs")


def _gpus() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            yield Finding(f"cuda:{number}", f"{about.name}, {about.total_memory / GIB:.0f} GiB")
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
        yield Finding("nccl", nccl or "not in this torch", "" if nccl else "backend=gloo")
        return
    if Path("/proc/driver/nvidia/version").exists():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        yield Finding("GPUs", f"there is a driver, and this torch (built for {built}) sees none", "nvidia-smi")
        return
    mps = torch.backends.mps.is_available()
    yield Finding(
        "GPUs", "Apple's, for one process with backend=auto" if mps else "none: backend=auto takes gloo on CPUs"
    )


def _limits() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        advice = "docker run --shm-size=8g" if size < SMALL_SHARED_MEMORY else ""
        yield Finding("/dev/shm", f"{size / GIB:.2g} GiB, where ranks and workers share memory", advice)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield Finding("open files", f"at most {files}", "ulimit -n 4096" if files < FEW_FILES else "")
    free = shutil.disk_usage(".").free
    can_write = os.access(".", os.W_OK)
    advice = "" if can_write else "cd <a folder that you may write to>"
    yield Finding(
        "this folder", f"{free / GIB:.0f} GiB free{'' if can_write else ', read-only'}", advice, not can_write
    )


def _names() -> Finding:
    name, start = socket.gethostname(), time.monotonic()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        address = None
    seconds = time.monotonic() - start
    advice = f"echo 127.0.1.1 {name} | sudo tee -a /etc/hosts"
    if address is None:
        return Finding("its name", f"{name} has no address, which ranks of several machines need", advice)
    found = f"{name} is {address}, found in {seconds:.1f} s"
    return Finding("its name", found, advice if seconds > SLOW_NAME else "")


def _sum() -> Finding:
    from lockstep.launchers.local import SpawnLauncher

    launcher, start = SpawnLauncher("fork", RANKS, 1, 0, "127.0.0.1", 0), time.monotonic()
    launcher.prepare("lockstep.rank_imports")
    try:
        milliseconds = launcher.launch(sum_over_ranks)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        return Finding("two ranks", f"cannot add up over gloo: {reason}", "lockstep backend.socket_ifname=lo", True)
    found = f"met in {time.monotonic() - start:.1f} s; a sum of {NUMBERS * 4 >> 20} MiB takes {milliseconds:.1f} ms"
    return Finding("two ranks", found)


def sum_over_ranks() -> float:
    """The milliseconds of an all-reduce over gloo."""
    import torch
    import torch.distributed as dist

    from lockstep.distributed.world import init_distributed

    with init_distributed("gloo", 20) as world:
        values = torch.ones(NUMBERS)
        dist.all_reduce(values)
        start = time.monotonic()
        dist.all_reduce(values)
        if values[0] != world.size**2:
            raise RuntimeError(f"the sum is {values[0]}, and must be {world.size**2}")
        return (time.monotonic() - start) * 1e3


def examine(say: Callable[[str], object] = print) -> bool:
    """Print a line for each finding. Returns whether training works here."""
    rows = list(findings())
    say(
        "\n".join(
            aligned(
                [(row.what, _mark(row), row.found + (f"; type {row.advice}" if row.advice else "")) for row in rows]
            )
        )
    )
    return not any(row.fails for row in rows)


def _mark(row: Finding) -> str:
    return "fails" if row.fails else "look" if row.advice else "ok"
