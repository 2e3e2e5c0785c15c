"""The monitor: a process beside the ranks of one machine, which records how each ends. It ends with them."""

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

from lockstep.failures.channel import Message, ProgressPage, Reader, peer, send
from lockstep.failures.report import FailureReport, MonitorOptions, remove_report, write_report
from lockstep.failures.watchdog import Watchdog
from lockstep.failures.watched_rank import WatchedRank, children, is_gone, open_pid_file

POLL_SECONDS = 0.2
FIRST_RANK_SECONDS = 900.0  # for the first rank to connect, where no launcher stays connected
END_SECONDS = 0.5  # from the first failure in which the other ranks of the machine report how they end
GRACE_SECONDS, GRACE_WHILE_SAVING = 5.0, 30.0  # from the first failure until the other ranks are killed
AGENT_SECONDS, AGENT_POLL_SECONDS = 35.0, 0.1  # for torchrun to end after its ranks


class Monitor:
    """Watches the ranks of one machine that connect to `listener`."""

    def __init__(self, listener: socket.socket, options: MonitorOptions) -> None:
        self.options, self.listener = options, listener
        self.selector = selectors.DefaultSelector()
        self.unmet: set[socket.socket] = set()  # connections without a first message
        self.ranks: list[WatchedRank] = []
        self.forgotten: list[WatchedRank] = []  # whose files are still open
        self.launcher: socket.socket | None = None
        self.launcher_lost_at: float | None = None
        self.run_dir: str | None = None
        self.started, self.started_wall_time = time.monotonic(), time.time()
        self.report: FailureReport | None = None
        self.watchdog: Watchdog | None = None
        self.is_over = self.is_printed = False
        listener.setblocking(False)
        self._watch(listener, self._accept)

    def run(self) -> None:
        """Until the ranks and the launcher are gone."""
        while not self.is_over:
            for key, _ in self.selector.select(POLL_SECONDS):
                if self.selector.get_map().get(key.fd) is key:  # else its rank was forgotten just now
                    key.data()
            self._check()

    def _watch(self, file: Any, callback: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, callback)

    # Who connects.

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:  # `_hear_all` was faster
            return
        credentials = peer(connection)
        if credentials is not None and credentials[1] not in (os.getuid(), 0):  # else the socket's file has permissions
            connection.close()
            return
        reader = Reader(connection)
        self.unmet.add(connection)
        self._watch(connection, lambda: self._read_first(connection, reader))

    def _read_first(self, connection: socket.socket, reader: Reader) -> None:
        """The first message says whether this is a rank or the launcher."""
        messages = reader.read()
        if not messages and reader.is_open:
            return
        self.selector.unregister(connection)
        self.unmet.remove(connection)
        if messages and "launcher" in messages[0]:
            self.launcher = connection
            self._watch(connection, lambda: self._read_launcher(reader))
            self._obey(messages[1:])
        elif messages and "hello" in messages[0] and len(reader.descriptors) >= 2:
            rank = self._add_rank(messages[0]["hello"], connection, reader)
            self._note(rank, messages[1:])
            if rank.is_visible and is_gone(rank.pid):  # a process that is reaped has no pidfd
                self._rank_ended(rank)
        else:
            connection.close()

    def _add_rank(self, hello: Message, connection: socket.socket, reader: Reader) -> WatchedRank:
        page, stacks, *asks = reader.descriptors
        credentials = peer(connection)
        is_visible = credentials is None or credentials[0] == hello["pid"]
        rank = WatchedRank(
            hello, connection, reader, ProgressPage(page), stacks, asks=asks[0] if asks else None, is_visible=is_visible
        )
        os.close(page)
        self.ranks.append(rank)
        self._watch(connection, lambda: self._read_rank(rank))
        if rank.pid_file is not None:
            self._watch(rank.pid_file, lambda: self._rank_ended(rank))
        return rank

    # What ranks say, and how they end.

    def _read_rank(self, rank: WatchedRank) -> None:
        self._note(rank, rank.reader.read())
        if not rank.reader.is_open and rank.connected:
            self.selector.unregister(rank.connection)
            rank.note_end_of_connection()

    def _note(self, rank: WatchedRank, messages: Sequence[Message]) -> None:
        for message in messages:
            rank.note(message)
            if "run_dir" in message:
                self.run_dir = message["run_dir"]
            elif "watch" in message:
                self.watchdog = self.watchdog or Watchdog(**message["watch"])
            elif message.get("ended") == "finished" and rank.rank == 0 and self.run_dir is not None:
                remove_report(self.run_dir, self.started_wall_time)

    def _rank_ended(self, rank: WatchedRank) -> None:
        if rank.pid_file is not None:
            self.selector.unregister(rank.pid_file)
        self._note(rank, rank.reader.read_rest())
        rank.note_death()

    def _hear_all(self) -> None:
        """Read what ranks have sent, also those that nobody has met yet.

        On a busy machine ranks connect, and end, before this process has begun to listen.
        """
        while keys := [key for key, _ in self.selector.select(0) if key.fileobj in {self.listener, *self.unmet}]:
            for key in keys:
                key.data()
        for rank in self.ranks:
            self._note(rank, rank.reader.read_rest())

    # What the launcher asks for.

    def _read_launcher(self, reader: Reader) -> None:
        assert self.launcher is not None
        self._obey(reader.read())
        if not reader.is_open and not self.is_over:  # the launcher was killed
            self.selector.unregister(self.launcher)
            self.launcher_lost_at = time.monotonic()
            if self.options.temporary_folder is not None:
                shutil.rmtree(self.options.temporary_folder, ignore_errors=True)

    def _obey(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if "ranks_ended" in message:
                self._answer_launcher(message["ranks_ended"])
            elif "next_attempt" in message:
                for rank in self.ranks:
                    rank.stop_watching(self.selector)
                self.forgotten, self.ranks, self.report = self.forgotten + self.ranks, [], None
                if self.watchdog is not None:
                    self.watchdog.expect_new_ranks(time.monotonic())
                self.options.attempt, self.started_wall_time = message["next_attempt"], time.time()
            elif "over" in message:
                self.is_over = True

    def _answer_launcher(self, exit_codes: dict[str, int]) -> None:
        """Send the report of the ranks, which have all ended. exit_codes: {pid: exit code}."""
        assert self.launcher is not None
        self._hear_all()
        for rank in self.ranks:
            rank.note_death(exit_codes.get(str(rank.pid)))
        self._compose()
        report = self.report and {"contents": self.report.contents, "screen": self.report.screen()}
        with suppress(OSError):  # the launcher does not wait any more
            send(self.launcher, {"report": report, "attempt": self.options.attempt})

    def _compose(self) -> None:
        timeout = None if self.watchdog is None else self.watchdog.backend_timeout
        self.report = write_report(self.ranks, self.run_dir, self.options, self.started_wall_time, timeout)

    # What depends on time.

    def _check(self) -> None:
        """Kill ranks that do not end, look for hangs, report where no launcher asks, end this process."""
        if self.watchdog is None or not self.watchdog.is_examining:  # a thread uses the files of ranks
            for rank in self.forgotten:
                rank.close()
            self.forgotten = []
        failed = [rank for rank in self.ranks if rank.has_failed]
        if failed:
            self._end_the_others(min(rank.failed_at for rank in failed))
        elif self.watchdog is not None:
            self.watchdog.look(self.ranks, self.run_dir)
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
            self.is_over = True
            if self._agent_has_ended():
                self._print()

    def _end_the_others(self, first_failure: float) -> None:
        """Kill ranks that do not end by themselves after another rank, or the launcher, has failed."""
        waited = time.monotonic() - first_failure
        for rank in self.ranks:
            grace = GRACE_WHILE_SAVING if rank.page.phase in ("snapshot", "disk") else GRACE_SECONDS
            if rank.is_alive and waited > grace:
                rank.kill()

    def _report_of_foreign_ranks(self) -> None:
        """Once all ranks have said how they end, or have had the time for it. Those that fail wait for the answer."""
        self._hear_all()
        is_late = any(rank.has_failed and time.monotonic() > rank.failed_at + END_SECONDS for rank in self.ranks)
        if not is_late and not all(rank.end_is_known for rank in self.ranks):
            return
        self._compose()
        if not self.options.agent:
            self._print()  # srun ends this process when the last rank has ended
        if self.report is None:
            return
        contents = self.report.contents
        screen = self.report.screen() if self.options.is_printed_by_rank else None
        for rank in self.ranks:
            is_first = rank.rank == contents["first"]["rank"]
            if rank.connected:
                with suppress(OSError):
                    answer = {"exit_code": contents["exit_code"], "is_first": is_first, "screen": screen}
                    send(rank.connection, answer)

    def _agent_has_ended(self) -> bool:
        """Wait for torchrun to end: its traceback comes before the report. False if it starts other ranks.

        True also after AGENT_SECONDS: a report at an odd place is better than none.
        """
        agent = self.options.agent
        pid_file = None if agent is None else open_pid_file(agent)
        if agent is None or pid_file is None:
            return True
        with selectors.DefaultSelector() as waiter:
            waiter.register(pid_file, selectors.EVENT_READ)
            for _ in range(round(AGENT_SECONDS / AGENT_POLL_SECONDS)):
                if waiter.select(AGENT_POLL_SECONDS):
                    return True
                if {*children(agent)} - {rank.pid for rank in self.ranks}:
                    return False
        return True

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
