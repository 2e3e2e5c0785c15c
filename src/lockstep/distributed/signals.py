"""How a run is asked to stop: by signals, in a rank and in the process that starts ranks.

Before the training there is nothing to save, so the first signal ends the process at once. During the training the
ranks agree on it at a step, save, and exit together. A second one ends the process at once. No torch at the top.
"""

import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from lockstep.compat import remove_temporary_folder
from lockstep.distributed.environment import read_rank_info
from lockstep.errors import EXIT_INTERRUPTED, EXIT_STOPPED_WITHOUT_SNAPSHOT, StoppedEarly, go_on_words, print_line
from lockstep.failures.record import heartbeat, is_echo
from lockstep.failures.report import failures_in, leave, newest_snapshot

log = logging.getLogger(__name__)

# SIGHUP: the terminal was closed. SIGUSR1: Slurm's warning before the time limit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
REPEAT_AFTER = 2.0  # seconds: one Ctrl-C can arrive twice, from the terminal and from the launcher


class Asked:
    """The signals that have asked for a stop: the first one, when, by the monotonic clock, and a repeated one."""

    first: int | None = None
    second: int | None = None
    first_at = 0.0

    def note(self, number: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.first_at = number, now
        elif self.second is None and number != signal.SIGUSR1 and now - self.first_at > REPEAT_AFTER:
            self.second = number


class _Process(Asked):
    """The state of signals in this process."""

    saves_first = False  # the ranks save after the first signal, before they end
    run_dir: str | Path = "."
    look: Callable[[float], object] | None = None  # called each second in the thread that hears signals
    writer: int | None = None  # a signal's number is written here, also while Python runs no code


_process, _looking = _Process(), threading.Lock()


def end_at_signals() -> None:
    """From here on the first signal ends this process at once, with one line. For the time before the training."""
    handle_signals(_on_signal)


def listen(run_dir: str | Path = ".") -> None:
    """Listen in a thread, which gets a signal also while this process waits in torch. For a rank. The first signal ends
    the process, except inside `stop_after_saving`."""
    _process.run_dir = run_dir
    # Slurm can preempt a job before it trains. Such a job must not fail, so it stops after its first step.
    _process.saves_first = read_rank_info().started_by == "srun"
    if _process.writer is None:
        reader, _process.writer = os.pipe()
        os.set_blocking(_process.writer, False)
        threading.Thread(target=_read_signals, args=(reader,), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=_forget_in_child)
    handle_signals(lambda number, frame: None)  # the thread acts
    signal.set_wakeup_fd(_process.writer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def each_second(look: Callable[[float], object] | None) -> None:
    """Call `look(time.monotonic())` once a second in the thread that hears signals. A call that runs is waited for."""
    with _looking:
        _process.look = look


def set_run_folder(run_dir: str | Path) -> None:
    """The folder whose snapshots are named when this run ends at once."""
    _process.run_dir = run_dir


def clean_up() -> None:
    """Remove what nobody else will when this process ends: also the folder of a launcher that was killed."""
    if heartbeat.launcher is None:
        remove_temporary_folder()
        leave()
    elif heartbeat.launcher != os.getppid() and heartbeat.folder is not None:
        shutil.rmtree(heartbeat.folder.parent, ignore_errors=True)


def stop_listening() -> None:
    """Ignore these signals: this rank is about to exit. srun sends SIGTERM to all ranks when the first one exits, and
    that must not change an exit code."""
    handle_signals(signal.SIG_IGN)


def stop_requested() -> bool:
    return _process.first is not None


@contextmanager
def blocked() -> Iterator[None]:
    """Inside the block no signal arrives. Processes that start there get it when they listen: Python's own handler
    would show a traceback while they import modules."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stop_after_saving() -> Iterator[None]:
    """Inside the block, and after it, the ranks save after the first signal, and end together. An error about a lost
    rank becomes StoppedEarly, if this rank was asked to stop before."""
    _process.saves_first = True
    try:
        yield
    except Exception as error:
        # A launcher asks the others to stop when a rank has failed.
        is_stop = stop_requested() and read_rank_info().world_size > 1 and is_echo(error)
        if is_stop and all(one["is_echo"] for one in failures_in(heartbeat.folder)):
            raise stopped_early() from error
        raise


def stopped_early(number: int | None = None, in_training: bool = True) -> StoppedEarly:
    """The error for a process that signal `number` ends at once, which in training is a second one; for a rank that has
    not answered a stop, if there is no number. The last step may be in no snapshot."""
    code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED_WITHOUT_SNAPSHOT
    if number is not None and not in_training:
        return StoppedEarly(f"ended by {_name(number)}; there is nothing to save", code)
    reason = "asked to stop, but not every rank answered"
    if number is not None:
        reason = f"ended at once by a second {_name(number)}"
    advice = "no snapshot was saved; start again with the same command"
    if (newest := newest_snapshot(Path(_process.run_dir))) is not None:
        advice = f"the last good snapshot is {newest}; go on there with {go_on_words(_process.run_dir)}"
    return StoppedEarly(f"{reason}; {advice}", code)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Handle the signals that ask for a stop. SIGHUP stays ignored if it is, as under nohup."""
    for number in STOP_SIGNALS:
        if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _on_signal(number: int, frame: FrameType | None = None) -> None:
    """Signal `number` has arrived. SIGUSR1 ends nothing before the training: Slurm sends it long before the end."""
    is_first = _process.first is None
    _process.note(number)
    if _process.second is not None or not (_process.saves_first or number == signal.SIGUSR1):
        heartbeat.enter("end")
        stopped, info = stopped_early(number, _process.saves_first), read_rank_info()
        # One process of a machine prints the last line: after a second signal the launcher, if it is ours.
        is_launchers = heartbeat.launcher is not None and _process.saves_first
        if not is_launchers and (info.local_rank == 0 or info.started_by == "environment"):
            print_line(f"lockstep: {stopped}", sys.stderr)
        clean_up()
        os._exit(stopped.code)
    if is_first and _process.saves_first and read_rank_info().rank == 0:
        print_line(f"{_name(number)}: stopping after this step; a second one ends at once", sys.stderr)


def _read_signals(reader: int) -> None:
    while True:
        ready, _, _ = select.select([reader], [], [], 1.0)
        for number in os.read(reader, 16) if ready else b"":
            if number in STOP_SIGNALS:
                _on_signal(number)
        with _looking:
            try:
                if _process.look is not None and not ready:
                    _process.look(time.monotonic())
            except Exception:  # a run does not fail by what looks after it
                log.warning("hangs are not looked for any more", exc_info=True)
                _process.look = None


def _forget_in_child() -> None:
    """A forked child has no thread that listens, and must not write to the pipe of its parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _process.writer = None


class Relay(Asked):
    """In the process that starts ranks: while the block runs, the signals that ask for a stop go on to the ranks."""

    pids: Sequence[int] = ()

    def start(self, pids: list[int]) -> None:
        """These are the ranks now. Those that are new get a signal that came before."""
        new, self.pids = [pid for pid in pids if pid not in self.pids], pids
        if self.first is not None:
            self.send(self.first, new)

    def send(self, number: int, pids: Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.note(number)
        self.send(number, self.pids)

    def __enter__(self) -> Self:
        self.before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        handle_signals(self._pass_on)
        if _process.first is not None:  # by SIGUSR1, which Slurm sends, and which ends no process so early
            self.note(_process.first)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
