"""The monitor as a program of its own. `lockstep.failures.start` starts it."""

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lockstep.failures.channel import Message, ProgressPage, Reader, is_same_user, peer_pid, send
from lockstep.failures.report import FailureReport, remove_report, write_report
from lockstep.failures.watchdog import HangDetector, HangRules, look_for_hang
from lockstep.failures.watched_rank import MonitorOptions, WatchedRank, children, is_gone, open_pid_file, writes_to_pipe

OnArrival = Callable[[Sequence[Message], socket.socket, Reader], None]
"""Takes the first messages of a connection; none if it was closed before."""


class Arrivals:
    """Takes connections at `listener`, and hands each to `on_arrival` once its first message is there."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, on_arrival: OnArrival) -> None:
        self.listener, self.selector, self.on_arrival = listener, selector, on_arrival
        self.waiting: set[socket.socket] = set()  # connections without a first message
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def take_all(self) -> None:
        """On a busy machine ranks connect, and end, before this process has begun to listen."""
        while found := [key for key, _ in self.selector.select(0) if key.fileobj in {self.listener, *self.waiting}]:
            for key in found:
                key.data()

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:  # `take_all` was faster
            return
        if not is_same_user(connection):
            connection.close()
            return
        reader = Reader(connection)
        self.waiting.add(connection)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._read_first(connection, reader))

    def _read_first(self, connection: socket.socket, reader: Reader) -> None:
        messages = reader.read()
        if messages or not reader.is_open:
            self.selector.unregister(connection)
            self.waiting.remove(connection)
            self.on_arrival(messages, connection, reader)


AGENT_SECONDS = 35.0  # for torchrun to end after its ranks
POLL_SECONDS = 0.1


def has_ended(agent: int | None, ranks: set[int]) -> bool:
    """Wait for torchrun to end: its traceback comes before the report. False if it starts other ranks."""
    if agent is None or (pid_file := open_pid_file(agent)) is None:
        return True
    waiter = selectors.DefaultSelector()
    waiter.register(pid_file, selectors.EVENT_READ)
    for _ in range(round(AGENT_SECONDS / POLL_SECONDS)):
        if waiter.select(POLL_SECONDS):
            return True
        if set(children(agent)) - ranks:
            return False
    return False


POLL_SECONDS = 0.2
FIRST_RANK_SECONDS = 900.0  # for the first rank to connect, where no launcher stays connected
END_SECONDS = 0.5  # from the first failure in which the other ranks of the machine report how they end
GRACE_SECONDS, GRACE_WHILE_SAVING = 5.0, 30.0  # from the first failure until the other ranks are killed


class Monitor:
    """Watches the ranks of one machine that connect to `listener`."""

    def __init__(self, listener: socket.socket, options: MonitorOptions) -> None:
        self.options = options
        self.selector = selectors.DefaultSelector()
        self.arrivals = Arrivals(listener, self.selector, self._take_arrival)
        self.ranks: list[WatchedRank] = []
        self.forgotten: list[WatchedRank] = []  # whose files are still open
        self.launcher: socket.socket | None = None
        self.launcher_lost_at: float | None = None
        self.run_dir: str | None = None
        self.started, self.started_wall_time = time.monotonic(), time.time()
        self.report: FailureReport | None = None
        self.detector: HangDetector | None = None
        self.is_over = self.is_printed = False

    def run(self) -> None:
        """Until the ranks and the launcher are gone."""
        while not self.is_over:
            for key, _ in self.selector.select(POLL_SECONDS):
                if self.selector.get_map().get(key.fd) is key:  # else its rank was forgotten just now
                    key.data()
            self._check()

    def _watch(self, file: Any, callback: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, callback)

    def _take_arrival(self, messages: Sequence[Message], connection: socket.socket, reader: Reader) -> None:
        """The first message says whether this is a rank or the launcher."""
        if messages and "launcher" in messages[0]:
            self.launcher = connection
            self._watch(connection, lambda: self._read_launcher(reader))
            self._obey(messages[1:])
        elif messages and "hello" in messages[0] and len(reader.descriptors) >= 2:
            rank = self._add_rank(messages[0]["hello"], connection, reader)
            self._note(rank, messages[1:])
            if rank.is_visible and is_gone(rank.pid):
                self._rank_ended(rank)
        else:
            connection.close()

    def _add_rank(self, hello: Message, connection: socket.socket, reader: Reader) -> WatchedRank:
        page, stacks = reader.descriptors[:2]
        is_visible = peer_pid(connection) in (None, hello["pid"])
        pid_file = open_pid_file(hello["pid"]) if is_visible else None
        rank = WatchedRank(hello, connection, reader, ProgressPage(page), stacks, pid_file, is_visible)
        rank.asks, rank.crash_pipe = reader.descriptors[2:4] or (None, None)
        os.close(page)
        self.ranks.append(rank)
        self._watch(connection, lambda: self._read_rank(rank))
        if rank.pid_file is not None:
            self._watch(rank.pid_file, lambda: self._rank_ended(rank))
        if rank.crash_pipe is not None:
            self._watch(rank.crash_pipe, lambda: self._rank_crashes(rank))
        return rank

    def _read_rank(self, rank: WatchedRank) -> None:
        self._note(rank, rank.reader.read())
        if not rank.reader.is_open and rank.connected:
            rank.connected = False
            self.selector.unregister(rank.connection)
            if rank.pid_file is None:
                rank.note_death()

    def _note(self, rank: WatchedRank, messages: Sequence[Message]) -> None:
        for message in messages:
            rank.note(message)
            if "run_dir" in message:
                self.run_dir = message["run_dir"]
            elif "watch" in message:
                self.detector = self.detector or HangDetector(HangRules(**message["watch"]))
            elif message.get("ended") == "finished" and rank.rank == 0 and self.run_dir is not None:
                remove_report(self.run_dir)

    def _rank_crashes(self, rank: WatchedRank) -> None:
        assert rank.crash_pipe is not None
        self.selector.unregister(rank.crash_pipe)
        can_examine = self.detector is not None and not rank.end_is_known
        rank.waits_in_crash = can_examine and rank.has_crash_text and not writes_to_pipe(rank.pid)
        if not rank.waits_in_crash:
            rank.read_crash()

    def _rank_ended(self, rank: WatchedRank) -> None:
        if rank.pid_file is not None:
            self.selector.unregister(rank.pid_file)
        self._note(rank, rank.reader.read_rest())
        rank.note_death()

    def _read_launcher(self, reader: Reader) -> None:
        assert self.launcher is not None
        self._obey(reader.read())
        if not reader.is_open and not self.is_over:  # the launcher was killed
            self.selector.unregister(self.launcher)
            self.launcher_lost_at = time.monotonic()
            if self.options.temporary_folder is not None:
                shutil.rmtree(self.options.temporary_folder, ignore_errors=True)

    def _obey(self, messages: Sequence[Message]) -> None:
        """What the launcher asks for."""
        for message in messages:
            if "ranks_ended" in message:
                self._answer(message["ranks_ended"])
            elif "next_attempt" in message:
                self._next_attempt(message["next_attempt"])
            elif "over" in message:
                self.is_over = True

    def _answer(self, exit_codes: dict[str, int]) -> None:
        """Send the launcher the report of the ranks, which have all ended. exit_codes: {pid: exit code}."""
        assert self.launcher is not None
        self._hear_all()
        for rank in self.ranks:
            rank.note_death()
            rank.exit_code = exit_codes.get(str(rank.pid), rank.exit_code)
        self._compose()
        with suppress(OSError):  # the launcher does not wait any more
            report = None if self.report is None else self.report.as_dict()
            send(self.launcher, {"report": report, "attempt": self.options.attempt})

    def _hear_all(self) -> None:
        """Read what ranks have sent, also those that nobody has met yet."""
        self.arrivals.take_all()
        for rank in self.ranks:
            self._note(rank, rank.reader.read_rest())

    def _next_attempt(self, attempt: int) -> None:
        for rank in self.ranks:
            rank.stop_watching(self.selector)
        self.forgotten += self.ranks
        self.ranks, self.report = [], None
        if self.detector is not None:
            self.detector.expect_new_ranks(time.monotonic())
        self.options.attempt, self.started_wall_time = attempt, time.time()

    def _check(self) -> None:
        """What depends on time: kill ranks that do not end, look for hangs, end this process."""
        if self.detector is None or not self.detector.is_examining:  # a thread uses the files of ranks
            for rank in self.forgotten:
                rank.close()
            self.forgotten = []
        failed = [rank for rank in self.ranks if rank.has_failed]
        if failed:
            self._end_the_others(min(rank.failed_at for rank in failed))
            for rank in self.ranks:
                if rank.waits_in_crash:
                    rank.read_crash()
        elif self.detector is not None:
            look_for_hang(self.detector, self.ranks, self.run_dir)
        if self.launcher_lost_at is not None:
            self._end_the_others(self.launcher_lost_at)
            self.is_over = not any(rank.is_alive for rank in self.ranks)
        if self.launcher is not None:
            return
        if not self.ranks or not self.options.is_foreign:  # a launcher that is killed early never connects
            self.is_over = self.is_over or time.monotonic() - self.started > FIRST_RANK_SECONDS
            return
        if failed and self.report is None:
            self._report_of_foreign_ranks()
        if not any(rank.is_alive for rank in self.ranks):
            self._finish()

    def _report_of_foreign_ranks(self) -> None:
        """Once all ranks have said how they end, or have had the time for it."""
        self._hear_all()
        is_late = any(rank.has_failed and time.monotonic() > rank.failed_at + END_SECONDS for rank in self.ranks)
        if is_late or all(rank.end_is_known for rank in self.ranks):
            self._compose()
            if not self.options.agent:
                self._print()  # srun ends this process when the last rank has ended
            self._answer_ranks()

    def _end_the_others(self, first_failure: float) -> None:
        """Kill ranks that do not end by themselves after another rank, or the launcher, has failed."""
        waited = time.monotonic() - first_failure
        for rank in self.ranks:
            grace = GRACE_WHILE_SAVING if rank.page.phase in ("snapshot", "disk") else GRACE_SECONDS
            if rank.died_at is None and rank.is_alive and waited > grace:
                rank.kill()

    def _compose(self) -> None:
        self.report = write_report(self.ranks, self.run_dir, self.options, self.started_wall_time)

    def _answer_ranks(self) -> None:
        """Ranks that fail wait for this. One that was started alone prints the report itself."""
        if self.report is None:
            return
        contents = self.report.contents
        for rank in self.ranks:
            answer = {"exit_code": contents["exit_code"], "is_first": rank.rank == contents["first"]["rank"]}
            answer["screen"] = self.report.screen() if self.options.is_printed_by_rank else None
            if rank.connected:
                with suppress(OSError):
                    send(rank.connection, answer)

    def _finish(self) -> None:
        """All ranks are gone."""
        self.is_over = True
        if self.report is not None and has_ended(self.options.agent, {rank.pid for rank in self.ranks}):
            self._print()

    def _print(self) -> None:
        """Show the report once, unless a rank that was started alone does it itself."""
        first = self.ranks[0]
        by_rank = self.options.is_printed_by_rank and first.failure is not None and not first.is_cause_of_hang
        if self.report is not None and self.report.kind != "config" and not by_rank and not self.is_printed:
            self.is_printed = True
            print(self.report.screen(), file=sys.stderr, flush=True)


def main() -> None:
    """The program. Its argument is the descriptor of the socket to listen on; stdin has the options as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the ranks
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    address = listener.getsockname()
    try:
        Monitor(listener, MonitorOptions(**json.load(sys.stdin))).run()
    finally:
        if isinstance(address, str):  # not abstract: a file, where the system is not Linux
            os.unlink(address)
