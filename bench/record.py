"""What a process measures of itself while it trains: times, bytes sent, memory. Without torch.

It reads the clock after every step and at the ends of epochs. `Record.write` puts one line of JSON into the file
$BENCH_RECORD.<rank>; without that variable rank 0 prints it.
"""

import json
import os
import resource
import socket
import struct
import time
from pathlib import Path
from typing import Any


class Record:
    """seconds: wall time. cpu: CPU seconds of this process and of its ended children. sent: bytes by TCP."""

    def __init__(self) -> None:
        self.first_step: float | None = None  # time.time() when the first step had ended
        self.steps: list[tuple[float, float]] = []  # (wall, CPU) clocks at the end of each step
        self.laps: dict[str, list[dict[str, float]]] = {"training": [], "evaluation": []}
        self.extra: dict[str, Any] = {}

    def stepped(self, *_: object) -> None:
        """An optimizer step has ended."""
        if self.first_step is None:
            self.first_step = time.time()
        self.steps.append((time.perf_counter(), time.process_time()))

    def start(self) -> None:
        """The next lap begins."""
        self.clocks = time.perf_counter(), cpu_seconds(), bytes_sent()

    def lap(self, what: str, samples: int) -> None:
        """A lap has ended, and the next begins. what: "training", "evaluation" or a floor. samples: of all ranks."""
        began = self.clocks
        self.start()
        seconds, cpu, sent = (after - before for after, before in zip(self.clocks, began, strict=True))
        self.laps.setdefault(what, []).append({"seconds": seconds, "cpu": cpu, "sent": sent, "samples": samples})

    def write(self, accuracy: float | None = None, rank: int | None = None) -> None:
        """accuracy: of the last evaluation, where this rank knows it."""
        rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        line = json.dumps({"first_step": self.first_step, **self.laps, "accuracy": accuracy, **memory(), **self.extra})
        if "BENCH_RECORD" in os.environ:
            Path(f"{os.environ['BENCH_RECORD']}.{rank}").write_text(line + "\n")
        elif rank == 0:
            print(line)


def cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def bytes_sent() -> int:
    """Bytes that this process has sent by TCP, retransmissions not counted, over its open sockets (Linux >= 4.19)."""
    total = 0
    folder = Path("/proc/self/fd")
    for path in list(folder.iterdir()) if folder.exists() else []:
        try:
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                    total += sent - again
        except (OSError, struct.error):  # closed meanwhile, or an older kernel
            pass
    return total


def memory() -> dict[str, float]:
    """In MB: rss, the peak of resident memory; resident, private, pss (its share) and own (no file behind it) now."""
    if not Path("/proc/self/smaps_rollup").exists():
        return {}
    found: dict[str, float] = {}
    for name in ("status", "smaps_rollup"):
        for line in Path("/proc/self", name).read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[key] = int(value.split()[0]) * 1024 / 1e6
    # Not ru_maxrss: it also covers the process that called exec.
    return {
        "rss": found["VmHWM"],
        "resident": found["Rss"],
        "private": found["Private_Clean"] + found["Private_Dirty"],
        "pss": found["Pss"],
        "own": found["Anonymous"],
    }
