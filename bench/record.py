"""What a process measures of itself while it trains: times, bytes sent, memory. Without torch."""

import json
import os
import re
import resource
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Record:
    """seconds: wall time. cpu: CPU seconds of this process and of its ended children. sent: bytes by TCP."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []  # (time.time(), CPU seconds) at the end of each step
        self.laps: dict[str, list[dict[str, float]]] = {"training": [], "evaluation": []}
        self.extra: dict[str, Any] = {}

    def stepped(self, *_: object) -> None:
        """An optimizer step has ended."""
        self.steps.append((time.time(), time.process_time()))

    def start(self) -> None:
        """The next lap begins."""
        cpu = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        self.clocks = {"seconds": time.perf_counter(), "cpu": cpu, "sent": bytes_sent()}

    def lap(self, what: str, samples: int) -> None:
        """A lap has ended, and the next begins. what: "training", "evaluation" or a floor. samples: of all ranks."""
        began = self.clocks
        self.start()
        lap = {key: clock - began[key] for key, clock in self.clocks.items()}
        self.laps.setdefault(what, []).append(lap | {"samples": samples})

    def write(self, accuracy: float | None = None, rank: int | None = None) -> None:
        """Into the file $BENCH_RECORD.<rank>. accuracy: of the last evaluation, where this rank knows it."""
        rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        found = {"first_step": self.steps[0][0] if self.steps else None, "steps": self.steps, "accuracy": accuracy}
        path = Path(f"{os.environ.get('BENCH_RECORD', 'record')}.{rank}")
        path.write_text(json.dumps(found | self.laps | memory() | self.extra))


def bytes_sent() -> int:
    """Bytes that this process has sent by TCP, retransmissions not counted, over its open sockets (Linux >= 4.19)."""
    total = 0
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError, struct.error):  # closed meanwhile, or an older kernel
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                        total += sent - again
    return total


def memory() -> dict[str, float]:
    """In MB: rss, the peak of resident memory; private, pss (its share) and own (no file behind it) now."""
    files = [Path("/proc/self", name) for name in ("status", "smaps_rollup")]
    if not files[1].exists():
        return {}
    text = "".join(file.read_text() for file in files)
    found = {key: int(value) * 1024 / 1e6 for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    private = found["Private_Clean"] + found["Private_Dirty"]
    # Not ru_maxrss: it also covers the process that called exec.
    return {"rss": found["VmHWM"], "private": private, "pss": found["Pss"], "own": found["Anonymous"]}
