"""One rank as its monitor sees it, and what Linux shows of its process."""

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.failures.channel import EPOCH, STEP, Message, ProgressPage, Reader
from lockstep.failures.record import last_lines
from lockstep.failures.reporter import LEAVE, PROBE
from lockstep.failures.verdict import parse_stack

EXIT_CODE_FIELD = 48  # of /proc/<pid>/stat, after the state of the process
LARGEST_STACKS = 2**24  # bytes
CRASH = "Fatal Python error: "  # faulthandler's words before the stack of a crash
CRASHES = {  # faulthandler's names
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}


@dataclass(eq=False)
class MonitoredRank:
    """hello: what the rank said when it connected. exit_code: as Python's subprocess has it; None if it is unknown."""

    hello: dict[str, Any]
    connection: socket.socket
    reader: Reader
    page: ProgressPage
    stacks: int  # the file in which faulthandler writes
    probe_socket: int | None = None  # the socket to ask it, see lockstep.failures.reporter
    log: str | None = None
    resumed_from: str | None = None  # a snapshot
    resumed_step: int = 0
    failure: dict[str, Any] | None = None  # the record of its exception, see lockstep.failures.record; or of a hang
    ends_well: bool = False  # it has said so: the run has finished, or was asked to stop
    died_at: float | None = None
    exit_code: int | None = None
    killed_by_monitor: bool = False
    out_of_memory: bool = False  # whether the kernel has killed for want of memory in this rank's control group

    def __post_init__(self) -> None:
        self.pid_file = open_pid_file(self.pid)  # becomes readable when the process ends
        if self.probe_socket is not None:
            os.set_blocking(self.probe_socket, False)
        self.oom_counters = _oom_counters(self.pid)  # the system forgets the group of a process that ends
        self.oom_kills_at_start = _oom_kills(self.oom_counters)

    @property
    def rank(self) -> int:
        return int(self.hello["rank"])

    @property
    def pid(self) -> int:
        return int(self.hello["pid"])

    @property
    def main_thread(self) -> str | None:
        """The identity of its main thread, as faulthandler writes it."""
        return self.hello.get("main_thread")

    @property
    def takes_part(self) -> bool:
        """Whether the rank still takes part in this run. A rank of a sweep may live on for the next job."""
        return self.died_at is None and (self.reader.is_open or not self.end_is_known)

    @property
    def has_failed(self) -> bool:
        """An exception, a hang, or an end without a word, also of a rank that the monitor has killed."""
        return self.failure is not None or (self.died_at is not None and not self.ends_well)

    @property
    def is_cause_of_hang(self) -> bool:
        return self.failure is not None and self.failure["kind"] == "hang"

    @property
    def failed_at(self) -> float:
        """By the monotonic clock."""
        if self.failure is not None:
            return float(self.failure["time"])
        return self.died_at or time.monotonic()

    @property
    def end_is_known(self) -> bool:
        """Whether it has reported how it ends, or has ended without a word."""
        return self.failure is not None or self.ends_well or self.died_at is not None

    def note(self, message: Message) -> None:
        """What the rank has sent, see `lockstep.failures.reporter`."""
        if "run_dir" in message:
            self.log = message["log"]
        elif "resumed" in message:
            self.resumed_from, self.resumed_step = message["resumed"]
        elif "failed" in message and self.failure is None:
            self.failure = message["failed"]
        elif "ends_well" in message:
            self.ends_well = True

    def note_death(self, exit_code: int | None = None) -> None:
        """The process has ended. Its exit code can be read as long as its parent has not asked for it.

        exit_code: what its parent was told.
        """
        if self.died_at is None:
            self.died_at = time.monotonic()
            state, *fields = _stat(self.pid)
            if state in ("Z", "X"):
                with suppress(IndexError, ValueError):
                    self.exit_code = os.waitstatus_to_exitcode(int(fields[EXIT_CODE_FIELD]))
            self.out_of_memory = _oom_kills(self.oom_counters) > self.oom_kills_at_start
            if self.exit_code is None:  # mpirun takes it before; faulthandler has written how it crashed
                crash = self._crash.partition("\n")[0]
                self.exit_code = -CRASHES[crash] if crash in CRASHES else None
        if exit_code is not None:
            self.exit_code = exit_code

    def position(self) -> dict[str, Any]:
        return {"epoch": self.page.get(EPOCH), "step": self.page.get(STEP), "phase": self.page.phase}

    @property
    def _crash(self) -> str:
        """What faulthandler has written of a crash, "" for none: its name and the stacks."""
        _, is_crash, text = self.read_stacks(0).rpartition(CRASH)
        return text if is_crash else ""

    def stack(self) -> list[str]:
        """The Python stack of a crash: of the thread that crashed if it has one, else of the main thread."""
        crash = self._crash
        frames = parse_stack(crash).frames or parse_stack(crash, self.main_thread).frames
        name = crash.partition("\n")[0]
        first = [CRASH + name] if name in CRASHES else []
        return first + [f'File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames]

    def log_lines(self) -> list[str]:
        if self.failure is not None:
            return list(self.failure.get("log_lines", []))
        return last_lines(self.log)

    def hangs(self, diagnosis: dict[str, Any]) -> None:
        """This rank is the cause of a hang. diagnosis: what the report says of it."""
        self.failure = {"kind": "hang", "time": time.monotonic(), "log_lines": last_lines(self.log), **diagnosis}

    def probe(self) -> None:
        """Ask the rank for its stacks and flight records. It answers if its Python threads can run."""
        self.read_answer()  # one that came too late
        self._send(PROBE)

    def leave(self) -> None:
        """Ask the rank to exit as one that hangs. It does so if its Python threads can run."""
        self._send(LEAVE)

    def _send(self, question: bytes) -> None:
        if self.probe_socket is not None:
            with suppress(OSError):  # it has ended
                os.write(self.probe_socket, question)

    def read_answer(self) -> bytes:
        """What has arrived of its flight records: a line of JSON."""
        answer = b""
        with suppress(OSError):  # nothing has arrived, or it has ended
            while self.probe_socket is not None and (data := os.read(self.probe_socket, 2**16)):
                answer += data
        return answer

    def stacks_size(self) -> int:
        return os.fstat(self.stacks).st_size

    def read_stacks(self, start: int) -> str:
        """What faulthandler has written from byte `start` on."""
        return os.pread(self.stacks, LARGEST_STACKS, start).decode(errors="replace")

    def kill(self) -> None:
        if self.died_at is None:
            self.killed_by_monitor = True
            with suppress(ProcessLookupError, PermissionError):
                if self.pid_file is None:
                    os.kill(self.pid, signal.SIGKILL)
                else:  # never another process that has got the same number
                    signal.pidfd_send_signal(self.pid_file, signal.SIGKILL)


def open_pid_file(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux; or its parent knows already that it has ended
        return None


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


def children(pid: int) -> list[int]:
    """The processes that any thread of `pid` has started."""
    with suppress(OSError):
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sorted(int(child) for text in lists for child in text.split())
    return []


def request_stack(pid: int) -> bool:
    """Ask for the stacks by a signal. False for a process without a handler, which the signal would end."""
    with suppress(OSError, ValueError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        if caught and int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1:
            os.kill(pid, signal.SIGUSR2)
            return True
    return False


def _oom_kills(counters: Sequence[Path]) -> int:
    """How often the kernel has killed for want of memory, by the first of `counters` that can be read."""
    for path in counters:
        with suppress(OSError):
            count = re.search(r"^oom_kill (\d+)", path.read_text(), re.M)
            if count:
                return int(count[1])
    return 0


def _oom_counters(pid: int) -> list[Path]:
    """Files with the counter of the control group of a process. Under Slurm each rank may have a group of its own."""
    paths = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            folder = Path("/sys/fs/cgroup", group.lstrip("/"))
            if not controllers:
                paths += [folder / "memory.events", Path("/sys/fs/cgroup/memory.events")]
            elif "memory" in controllers.split(","):
                paths.append(Path("/sys/fs/cgroup/memory", group.lstrip("/"), "memory.oom_control"))
    return paths
