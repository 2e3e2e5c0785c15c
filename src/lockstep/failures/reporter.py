"""What a rank reports to its monitor: where it is, and how it ends. Without a monitor these functions do nothing.

The monitor examines a rank that hangs in two ways. On request a thread of the rank writes the Python stacks of all
threads and sends torch's flight record. This thread needs the GIL: without an answer, the GIL is held. Then SIGUSR2
makes `faulthandler` write the stacks, in C and without the GIL. The signal comes second because it can crash a rank
whose threads run Python, as when torch's compiler traces a model. Nothing of this runs in a step.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lockstep.compat import flight_records
from lockstep.errors import EXIT_FAILED, EXIT_HANG
from lockstep.failures import channel
from lockstep.failures.channel import EPOCH, HEARTBEAT_AT, ProgressPage, create_unnamed_file
from lockstep.failures.record import exception_record, last_lines

ADDRESS = "LOCKSTEP_MONITOR"  # the environment variable with the name of the monitor's address
STACK_SIGNAL = getattr(signal, "SIGUSR2", None)
PROBE, LEAVE = b"?", b"x"  # what the monitor may send
RECORDED_COLLECTIVES = "256"  # torch's default of 2000 takes 30 ms and 1 MB to send
MOST_SAMPLES = 1000  # of a batch, see lockstep.data.partition.Batch: a message has a limit


class Reporter:
    """A rank's connection to its monitor, and its progress page. connection: None without a monitor."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.connection, self.pid, self.world_size = connection, os.getpid(), 1
        self.page = ProgressPage(bytearray(channel.SIZE))
        self.samples: Callable[[], list[int]] | None = None
        self.log_file: str | None = None

    @property
    def is_copy(self) -> bool:
        """Whether this process is no rank: the user's code has forked it from one."""
        return self.connection is not None and os.getpid() != self.pid

    def send(self, message: channel.Message, *descriptors: int) -> None:
        if self.connection is not None and not self.is_copy:
            with suppress(OSError):  # the monitor was killed: the run goes on without a report
                channel.send(self.connection, message, descriptors)

    def introduce(self, hello: dict[str, Any]) -> None:
        """Send the monitor `hello`, the page, and what it needs to examine this rank.

        These are the file that stacks are written to and, on Linux, the socket on which it is asked for them.
        """
        page, self.stacks = create_unnamed_file("lockstep-page", channel.SIZE), create_unnamed_file("lockstep-stacks")
        self.page = ProgressPage(page)
        self.world_size = hello["world_size"]
        hello["main_thread"] = f"0x{threading.main_thread().ident:016x}"  # as faulthandler writes it
        faulthandler.enable(self.stacks)  # for a crash
        descriptors = [page, self.stacks]
        if sys.platform == "linux" and STACK_SIGNAL is not None:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)  # before a process group is formed
            # Loader workers that are forked from this rank inherit the file and the handler.
            faulthandler.register(STACK_SIGNAL, file=self.stacks, all_threads=True)
            here, there = socket.socketpair()
            threading.Thread(target=_answer, args=(here, self.stacks), name="lockstep-probe", daemon=True).start()
            descriptors.append(there.detach())
        self.send({"hello": hello}, *descriptors)
        for descriptor in {*descriptors} - {self.stacks}:
            os.close(descriptor)


def _answer(connection: socket.socket, stacks: int) -> None:
    """Do what the monitor asks for: write the stacks and send the flight records, as a line of JSON, or leave."""
    with suppress(OSError), connection:
        while question := connection.recv(1):
            if question == LEAVE:
                os._exit(EXIT_HANG)
            faulthandler.dump_traceback(stacks, all_threads=True)
            connection.sendall(b"[" + b",".join(flight_records()) + b"]\n")


_reporter = Reporter()


def connect(name: str, rank: int, world_size: int) -> None:
    """Connect to the monitor called `name`."""
    global _reporter
    connection = channel.connect(channel.address_of(name), timeout=2)
    if connection is not None:
        _reporter = Reporter(connection)
        hello = {"rank": rank, "world_size": world_size, "pid": os.getpid(), "host": socket.gethostname()}
        _reporter.introduce(hello)


def is_connected() -> bool:
    return _reporter.connection is not None


def disconnect() -> None:
    """Leave the monitor. The next job of a sweep has another one."""
    global _reporter
    if _reporter.connection is not None:
        faulthandler.disable()
        if STACK_SIGNAL is not None:
            faulthandler.unregister(STACK_SIGNAL)
        _reporter.connection.close()
        os.close(_reporter.stacks)
    _reporter = Reporter()


def set_run(run_dir: str, log_file: str) -> None:
    """Where the run folder and this rank's log are."""
    _reporter.log_file = log_file
    _reporter.send({"run_dir": os.path.abspath(run_dir), "log": os.path.abspath(log_file)})


def set_hang_rules(timeout: float | None, on_hang: str, backend_timeout: float) -> None:
    """When a silence is a hang, and what the monitor does then: see `lockstep.failures.hang_detector.HangDetector`."""
    _reporter.send({"hang_rules": {"timeout": timeout, "on_hang": on_hang, "backend_timeout": backend_timeout}})


def resumed(snapshot: str, step: int) -> None:
    """This rank goes on from `snapshot`, in this run folder or in another one."""
    _reporter.send({"resumed": [snapshot, step]})


def page() -> ProgressPage:
    """This rank's progress page."""
    return _reporter.page


def enter(name: str) -> None:
    """From here on the rank is in the phase `name`, one of channel.PHASES, and computes no training batch yet."""
    _reporter.samples = None
    _reporter.page.enter(name)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside the block the rank is in the phase `name`, one of channel.PHASES; after it, in the phase before.

    An exception leaves the phase as it is, so that the report has the one in which the rank failed.
    """
    before = _reporter.page.phase
    _reporter.page.enter(name)
    yield
    _reporter.page.enter(before)


def epoch_starts(epoch: int) -> None:
    """epoch: counted from 1."""
    _reporter.page.set(EPOCH, epoch)


def step_ended(epoch: int, step: int) -> None:
    """epoch: counted from 1. step: optimizer steps done."""
    _reporter.page.step_ended(epoch, step)


def heartbeat() -> None:
    """A piece of the phase's work is done, such as a batch of an evaluation: the rank does not hang."""
    _reporter.page.set_time(HEARTBEAT_AT)


def training_on(samples: Callable[[], list[int]]) -> None:
    """samples: gives the numbers of those that the rank computes, and is called if it fails."""
    _reporter.samples = samples


@contextmanager
def failures() -> Iterator[None]:
    """Tell the monitor of an exception that leaves the block, before other blocks are left and take their time."""
    try:
        yield
    except SystemExit as error:
        _end_copy(error)
        raise
    except Exception as error:
        failed(error)
        raise


def failed(error: BaseException) -> None:
    """Tell the monitor that this rank fails. It heeds the first call."""
    if _reporter.connection is None:
        return
    _end_copy(error)
    record: dict[str, Any] = {"time": time.monotonic(), "samples": []} | exception_record(error)
    with suppress(Exception):  # they are a part of what failed
        record["samples"] = [] if _reporter.samples is None else _reporter.samples()[:MOST_SAMPLES]
    record["is_communication"] &= _reporter.world_size > 1
    record["phase"] = _reporter.page.phase  # by the time of the report it may close its files
    record["log_lines"] = last_lines(_reporter.log_file)
    _reporter.send({"failed": record})


def _end_copy(error: BaseException) -> None:
    """End this process, which `error` ends, if the user's code has forked it from the rank.

    It would otherwise close the rank's files, and wait for threads that a fork does not have.
    """
    if _reporter.is_copy:
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            os._exit(error.code or 0)
        traceback.print_exception(error)
        os._exit(EXIT_FAILED)


def ends_well() -> None:
    """Tell the monitor that this rank is about to exit as it should: the run has finished, or was asked to stop."""
    _reporter.page.enter("end")
    _reporter.send({"ends_well": True})


def wait_for_report() -> dict[str, Any] | None:
    """The monitor's answer to `failed`, when it has written and printed the report; None without one.

    "exit_code": of the run. "is_first": whether this rank failed first.
    """
    if _reporter.connection is None:
        return None
    return channel.Reader(_reporter.connection).wait_for("exit_code")
