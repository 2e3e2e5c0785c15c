"""What a rank reports to its monitor: where it is, and how it ends. Without a monitor these functions do nothing."""

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.errors import EXIT_FAILED
from lockstep.monitor import channel, rank_probe
from lockstep.monitor.exception_record import exception_record, last_lines
from lockstep.monitor.progress_page import EPOCH, ProgressPage, create_page_file, create_unnamed_file

ADDRESS = "LOCKSTEP_MONITOR"  # the environment variable with the name of the monitor's address
MOST_SAMPLES = 1000  # that are named in a report
# How long a rank that fails waits for the report: the monitor may be slow on a busy machine. It kills ranks after 5 s.
REPORT_SECONDS = 4.0


class RankReporter:
    """A rank's connection to its monitor, and its progress page.

    stacks: a file in which faulthandler writes the Python stack of a rank that crashes, or that is asked for it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.reader = connection, channel.Reader(connection)
        self.pid = os.getpid()
        self.page_file, self.stacks = create_page_file(), create_unnamed_file("lockstep-stacks")
        self.page = ProgressPage(self.page_file)
        self.batch: Any = None
        self.log_file: str | None = None
        self.reported: BaseException | None = None

    @property
    def is_copy(self) -> bool:
        """Whether this process is no rank: the user's code has forked it from one."""
        return os.getpid() != self.pid

    def send(self, message: channel.Message, *descriptors: int) -> None:
        if self.is_copy:
            return
        with contextlib.suppress(OSError):  # the monitor was killed: the run goes on without a report
            channel.send(self.connection, message, descriptors)


_reporter: RankReporter | None = None
_may_start = False


def connect(name: str, rank: int, world_size: int, **facts: Any) -> None:
    """Connect to the monitor called `name`. facts: JSON values about this rank and how it was started."""
    global _reporter
    connection = channel.connect(channel.address_of(name), timeout=2)
    if connection is None:
        return
    _reporter = RankReporter(connection)
    main_thread, descriptors = rank_probe.install(_reporter.stacks)
    hello = {"rank": rank, "world_size": world_size, "pid": os.getpid(), "host": socket.gethostname(), **facts}
    hello["main_thread"] = main_thread
    _reporter.send({"hello": hello}, _reporter.page_file, _reporter.stacks, *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def started_by_rank() -> Iterator[None]:
    """Inside the block the rank may start a monitor: no launcher of this project has started one."""
    global _may_start
    _may_start = True
    try:
        yield
    finally:
        _may_start = False
        disconnect()


def may_start_monitor() -> bool:
    return _may_start


def set_run(run_dir: str, log_file: str, clock_ahead: float) -> None:
    """Where the run folder and this rank's log are. clock_ahead: seconds from rank 0's clock to this rank's."""
    if _reporter is not None:
        _reporter.log_file = log_file
        folder, log_file = os.path.abspath(run_dir), os.path.abspath(log_file)
        _reporter.send({"run_dir": folder, "log": log_file, "clock_ahead": clock_ahead})


def watch_for_hangs(timeout: float | None, on_hang: str, backend_timeout: float) -> None:
    """Ask the monitor to end or report a run that hangs, see `lockstep.monitor.hang_detector.HangRules`."""
    if _reporter is not None:
        _reporter.send({"watch": {"timeout": timeout, "on_hang": on_hang, "backend_timeout": backend_timeout}})


def resumed(snapshot: str, step: int) -> None:
    """This rank goes on from `snapshot`, in this run folder or in another one."""
    if _reporter is not None:
        _reporter.send({"resumed": [snapshot, step]})


def enter(name: str) -> None:
    """From here on the rank is in the phase `name`, one of progress_page.PHASES, and computes no training batch yet."""
    if _reporter is not None:
        _reporter.batch = None
        _reporter.page.enter(name)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside the block the rank is in the phase `name`, one of progress_page.PHASES; after it, in the phase before.

    An exception leaves the phase as it is, so that the report has the one in which the rank failed.
    """
    if _reporter is None:
        yield
        return
    before = _reporter.page.phase
    _reporter.page.enter(name)
    yield
    _reporter.page.enter(before)


def epoch_starts(epoch: int) -> None:
    """epoch: counted from 1."""
    if _reporter is not None:
        _reporter.page.set(EPOCH, epoch)


def step_ended(epoch: int, step: int) -> None:
    """epoch: counted from 1. step: optimizer steps done."""
    if _reporter is not None:
        _reporter.page.step_ended(epoch, step)


def heartbeat() -> None:
    """A piece of the phase's work is done, such as a batch of an evaluation: the rank does not hang."""
    if _reporter is not None:
        _reporter.page.heartbeat()


def page() -> ProgressPage | None:
    """This rank's progress page, None without a monitor."""
    return None if _reporter is None else _reporter.page


def current_batch(batch: Any) -> None:
    """The batch that the rank computes. Its parts' indices are read only if the rank fails."""
    if _reporter is not None:
        _reporter.batch = batch


def failed(error: BaseException) -> None:
    """Tell the monitor that this rank fails. A second call for the same exception does nothing."""
    if _reporter is None or _reporter.reported is error:
        return
    end_copy(error)
    now = time.monotonic()
    _reporter.reported = error
    record = exception_record(error) | {"time": now, "wall_time": time.time(), "samples": _samples(_reporter.batch)}
    record["phase"] = _reporter.page.phase  # by the time of the report it may close its files
    record["log_lines"] = last_lines(_reporter.log_file)
    _reporter.send({"failed": record})


def end_copy(error: BaseException) -> None:
    """End this process, which `error` ends, if the user's code has forked it from the rank.

    It would otherwise close the rank's files, and wait for threads that a fork does not have.
    """
    if _reporter is None or not _reporter.is_copy:
        return
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        os._exit(error.code or 0)
    traceback.print_exception(error)
    os._exit(EXIT_FAILED)


@contextmanager
def failures() -> Iterator[None]:
    """Tell the monitor of an exception that leaves the block, before other blocks are left and take their time."""
    try:
        yield
    except SystemExit as error:
        end_copy(error)
        raise
    except Exception as error:
        failed(error)
        raise


def ended(how: str) -> None:
    """Tell the monitor that this rank is about to exit as it should. how: "finished" or "stopped"."""
    if _reporter is not None:
        _reporter.page.enter("end")
        _reporter.send({"ended": how})


def wait_for_report() -> dict[str, Any] | None:
    """The monitor's answer to `failed`, at once or within REPORT_SECONDS; None without one.

    "screen": the report, if this rank shall print it. "exit_code": of the run. "is_first": whether this rank failed
    first.
    """
    return None if _reporter is None else _reporter.reader.wait_for("exit_code", REPORT_SECONDS)


def disconnect() -> None:
    """Leave the monitor. The next job of a sweep has another one."""
    global _reporter
    if _reporter is not None:
        rank_probe.remove()
        _reporter.connection.close()
        os.close(_reporter.stacks)
        os.close(_reporter.page_file)
        _reporter = None


def _samples(batch: Any) -> list[int]:
    """The first sample indices of a batch, see lockstep.data.partition.Batch. A message has a limit."""
    try:
        return [int(index) for part in batch.parts for index in part.indices.tolist()][:MOST_SAMPLES]
    except Exception:  # no batch yet; or a device that failed, from which nothing can be read
        return []
