"""What a rank reports to its monitor: where it is, and how it ends. Without a monitor these functions do nothing."""

import contextlib
import faulthandler
import fcntl
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lockstep.errors import EXIT_FAILED, EXIT_HANG
from lockstep.failures import channel
from lockstep.failures.channel import EPOCH, ProgressPage, create_page_file, create_unnamed_file
from lockstep.failures.record import exception_record, last_lines

STACK_SIGNAL = getattr(signal, "SIGUSR2", None)
ASK, LEAVE = b"?", b"x"  # what the monitor may send
RECORDED_COLLECTIVES = "256"  # torch's default of 2000 takes 30 ms and 1 MB to send

_crash_pipe: int | None = None  # the end that faulthandler writes to


def install(stacks: int) -> tuple[str, list[int]]:
    """Called once in a rank before its process group is formed. stacks: the file that stacks are written to.

    Returns the identity of the main thread as stacks have it, and descriptors to send to the monitor: the socket on
    which the rank is asked for its stacks and its flight record, and the pipe of a crash. The caller closes them once
    they are sent. No descriptors where this is not Linux.
    """
    global _crash_pipe
    main_thread = f"0x{threading.main_thread().ident:016x}"
    if sys.platform != "linux" or STACK_SIGNAL is None:
        faulthandler.enable(stacks)
        return main_thread, []
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)
    # Loader workers that are forked from this rank inherit the file and the handler.
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    here, there = socket.socketpair()
    threading.Thread(target=_answer, args=(here, stacks), name="lockstep-probe", daemon=True).start()
    crash, _crash_pipe = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)  # each write is a packet of its own
    fcntl.fcntl(_crash_pipe, fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)  # of which there is room for one
    faulthandler.enable(_crash_pipe)
    return main_thread, [there.detach(), crash]


def remove() -> None:
    """Undo `install`. Its thread ends when the monitor closes the other end of the socket."""
    global _crash_pipe
    faulthandler.disable()
    if STACK_SIGNAL is not None:
        faulthandler.unregister(STACK_SIGNAL)
    if _crash_pipe is not None:
        os.close(_crash_pipe)
        _crash_pipe = None


def _answer(connection: socket.socket, stacks: int) -> None:
    """Do what the monitor asks for: write the stacks and send the flight record, as JSON and a line end, or leave."""
    with suppress(OSError), connection:
        while question := connection.recv(1):
            if question == LEAVE:
                os._exit(EXIT_HANG)
            faulthandler.dump_traceback(stacks, all_threads=True)
            connection.sendall(flight_record() + b"\n")


def flight_record() -> bytes:
    """torch's record of the last collectives of this process, as JSON; `{}` where this torch has none.

    Without stacks: torch looks up their lines while it holds the recorder's lock, which takes a second.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")  # an import could wait for an import that hangs
    try:
        return bytes(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, TypeError):  # torch 2.14: private
        return b"{}"


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
    main_thread, descriptors = install(_reporter.stacks)
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
    """Ask the monitor to end or report a run that hangs, see `lockstep.failures.watchdog.HangRules`."""
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
        remove()
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
