"""One rank as its monitor sees it, and what Linux shows of its process."""

import os
import select
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.failures.causes import crash_in_stack, oom_counters, oom_kills
from lockstep.failures.channel import EPOCH, STEP, Message, ProgressPage, Reader
from lockstep.failures.rank import LEAVE
from lockstep.failures.record import last_lines
from lockstep.failures.verdict import parse_stack


@dataclass
class MonitorOptions:
    """Values of JSON: the process that starts the monitor writes them to its stdin.

    is_foreign: another program has started the ranks, so the monitor prints the report, and ends by itself.
    is_printed_by_rank: a rank that was started alone prints the report. agent: torchrun's pid. command: the typed
    words. temporary_folder: what the monitor removes if the launcher is killed. attempt: restarts so far.
    """

    is_foreign: bool = False
    is_printed_by_rank: bool = False
    agent: int | None = None
    command: list[str] = field(default_factory=list)
    temporary_folder: str | None = None
    attempt: int = 0


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


CRASH_SECONDS = 0.2  # for the next words of a rank that crashes
EXIT_CODE_FIELD = 49  # of /proc/<pid>/stat, after the name of the program


@dataclass(eq=False)
class WatchedRank:
    """hello: what the rank said when it connected. exit_code: as Python's subprocess has it; None if it is unknown."""

    hello: dict[str, Any]
    connection: socket.socket
    reader: Reader
    page: ProgressPage
    stacks: int  # the file in which faulthandler writes
    pid_file: int | None  # becomes readable when the process ends
    is_visible: bool = True  # False in a container of its own, where its process has another number
    asks: int | None = None  # the socket to ask it, see lockstep.failures.rank
    crash_pipe: int | None = None  # what it writes if it crashes; it waits until that is read
    waits_in_crash: bool = False  # in a thread beside the main one, see lockstep.failures.rank
    crash: str = ""
    log: str | None = None
    clock_ahead: float = 0.0  # seconds from the clock of rank 0's machine to this machine's
    resumed_from: str | None = None  # a snapshot
    resumed_step: int = 0
    failure: dict[str, Any] | None = None  # the record of its exception, see lockstep.failures.record
    ended: str | None = None  # "finished" or "stopped"
    connected: bool = True
    died_at: float | None = None
    died_at_wall_time: float | None = None
    exit_code: int | None = None
    killed_by_monitor: bool = False
    out_of_memory: bool = False  # whether the kernel has killed for want of memory in this rank's control group

    def __post_init__(self) -> None:
        self.oom_counters = oom_counters(self.pid)  # the system forgets the group of a process that ends
        self.oom_kills_at_start = oom_kills(self.oom_counters)

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
    def is_alive(self) -> bool:
        """Whether the rank still takes part in this run. A rank of a sweep may live on for the next job."""
        return self.died_at is None and (self.connected or self.ended is None and self.failure is None)

    @property
    def has_failed(self) -> bool:
        """An exception, or an end without a word."""
        return self.failure is not None or (self.died_at is not None and self.ended is None)

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
    def failed_at_time_of_day(self) -> float | None:
        """In seconds since 1970, by the clock of rank 0's machine. None if it did not fail by itself."""
        at = self.died_at_wall_time if self.failure is None else self.failure["wall_time"]
        return None if at is None else at - self.clock_ahead

    @property
    def end_is_known(self) -> bool:
        """Whether it has reported how it ends, or has ended."""
        return self.failure is not None or self.ended is not None or self.died_at is not None

    def note(self, message: Message) -> None:
        """What the rank has sent, see `lockstep.failures.rank`."""
        if "run_dir" in message:
            self.log, self.clock_ahead = message["log"], message["clock_ahead"]
        elif "resumed" in message:
            self.resumed_from, self.resumed_step = message["resumed"]
        elif "failed" in message and self.failure is None:
            self.failure = message["failed"]
        elif "ended" in message:
            self.ended = message["ended"]

    def note_death(self) -> None:
        """The process has ended. Its exit code can be read as long as its parent has not asked for it."""
        if self.died_at is None:
            self.died_at, self.died_at_wall_time = time.monotonic(), time.time()
            self.exit_code = zombie_exit_code(self.pid)
            self.out_of_memory = oom_kills(self.oom_counters) > self.oom_kills_at_start
            if self.exit_code is None:
                self.exit_code = crash_in_stack(self.stack())

    @property
    def has_crash_text(self) -> bool:
        """Whether it has written to its crash pipe. A rank that ends closes the pipe."""
        assert self.crash_pipe is not None
        poll = select.poll()
        poll.register(self.crash_pipe, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    def position(self) -> dict[str, Any]:
        return {"epoch": self.page.get(EPOCH), "step": self.page.get(STEP), "phase": self.page.phase}

    def read_crash(self) -> None:
        """Read what the rank writes as it crashes, until it ends."""
        self.waits_in_crash = False
        while self.crash_pipe is not None:
            ends = [self.crash_pipe] if self.pid_file is None else [self.crash_pipe, self.pid_file]
            ready = select.select(ends, [], [], CRASH_SECONDS)[0]
            text = os.read(self.crash_pipe, 2**12).decode(errors="replace") if self.crash_pipe in ready else ""
            self.crash += text
            if not text:
                os.close(self.crash_pipe)  # who writes to it from now on does not wait
                self.crash_pipe = None

    def stack(self) -> list[str]:
        """The Python stack that faulthandler has written, and the crash: of the thread that crashed if it has one."""
        text = self.crash
        with suppress(OSError):
            text = text or os.pread(self.stacks, 2**16, 0).decode(errors="replace")
        crash = [line for line in text.splitlines() if line.startswith("Fatal Python error")][:1]
        frames = (crash and parse_stack(text).frames) or parse_stack(text, self.main_thread).frames
        return crash + [f'File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames]

    def log_lines(self) -> list[str]:
        if self.failure is not None:
            return list(self.failure.get("log_lines", []))
        return last_lines(self.log)

    def hangs(self, diagnosis: dict[str, Any]) -> None:
        """This rank is the cause of a hang. diagnosis: what the report says of it."""
        self.failure = {"kind": "hang", "time": time.monotonic(), "wall_time": time.time(), **diagnosis}
        self.failure["log_lines"] = last_lines(self.log)

    def leave(self) -> None:
        """Ask the rank to exit as one that hangs. It does so if its Python threads can run."""
        if self.asks is not None:
            with suppress(OSError):
                os.write(self.asks, LEAVE)

    def kill(self) -> None:
        if not self.is_visible:
            return
        self.killed_by_monitor = True
        with suppress(ProcessLookupError, PermissionError):
            if self.pid_file is None:
                os.kill(self.pid, signal.SIGKILL)
            else:  # never another process that has got the same number
                signal.pidfd_send_signal(self.pid_file, signal.SIGKILL)

    def stop_watching(self, selector: selectors.BaseSelector) -> None:
        """Another process has its number now."""
        for file in (self.connection, self.pid_file, self.crash_pipe):
            if file is not None and file in selector.get_map():
                selector.unregister(file)

    def close(self) -> None:
        self.connection.close()
        self.page.memory.close()
        for file in (self.stacks, self.pid_file, self.asks, self.crash_pipe):
            if file is not None:
                os.close(file)


def open_pid_file(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def is_gone(pid: int) -> bool:
    """Whether a process has ended and its parent knows it, so that no descriptor of it can be opened any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it runs as another user
        pass
    return False


def process_has_ended(pid: int) -> bool:
    """Whether a process has ended, whether its parent knows it or not."""
    return is_gone(pid) or zombie_exit_code(pid) is not None


def zombie_exit_code(pid: int) -> int | None:
    """How a process ended, if its parent has not asked for it yet: its exit code, or minus the signal. Else None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = int(fields[EXIT_CODE_FIELD])
    except (OSError, IndexError, ValueError):
        return None
    return os.waitstatus_to_exitcode(status) if fields[0] in "ZX" else None
