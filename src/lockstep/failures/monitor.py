"""The monitor: a process beside the ranks of one machine, which records how each ends. It ends with
them, or with their launcher.
"""

import json
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.failures.channel import Message, ProgressPage, Reader, peer, send
from lockstep.failures.hang_detector import HangDetector
from lockstep.failures.monitored_rank import MonitoredRank, open_pid_file
from lockstep.failures.report import MonitorOptions, Report, read_report, remove_report, screen, write_report

POLL_SECONDS = 0.2
FIRST_RANK_SECONDS = 900.0  # for the first rank, or the launcher, to connect
END_SECONDS = 0.5  # from the first failure in which the other ranks of the machine report how they end
# From the first failure until ranks that still live are killed: after a hang, while one saves, and else.
GRACE_AFTER_HANG, GRACE_WHILE_SAVING, GRACE_SECONDS = 0.5, 30.0, 5.0
AGENT_SECONDS = 35.0  # for torchrun to end after its ranks


class Monitor:
    """Watches the ranks of one machine that connect to `listener`."""

    def __init__(self, listener: socket.socket, options: MonitorOptions) -> None:
        self.options, self.listener = options, listener
        self.selector = selectors.DefaultSelector()
        self.ranks: list[MonitoredRank] = []
        self.launcher: socket.socket | None = None
        self.launcher_lost_at: float | None = None
        self.requests: list[Message] = []  # of the launcher, not answered yet
        self.run_dir: str | None = None
        self.before: Report | None = None  # the report of an earlier start
        self.started = time.monotonic()
        self.report: Report | None = None
        self.hang_detector: HangDetector | None = None
        self.is_over = False
        listener.setblocking(False)
        self._when_readable(listener, self._accept)

    def run(self) -> None:
        """Until the ranks and the launcher are gone.

        The launcher is answered when all that ranks have sent is read: on a busy machine they connect, and end, before
        this process has begun to listen.
        """
        while not self.is_over:
            ready = self.selector.select(POLL_SECONDS)
            while ready:
                for key, _ in ready:
                    key.data()
                ready = self.selector.select(0)
            for request in self.requests:
                self._obey(request)
            self.requests = []
            self._check()
        if self.run_dir is not None and self.before is not None and self.report is None:
            remove_report(Path(self.run_dir))  # it tells of a start that was not the last

    def _when_readable(self, file: Any, callback: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, callback)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        credentials = peer(connection)
        if credentials is not None and credentials[1] not in (os.getuid(), 0):  # else the socket's file has permissions
            connection.close()
            return
        reader = Reader(connection)
        self._when_readable(connection, lambda: self._read_first(connection, reader))

    def _read_first(self, connection: socket.socket, reader: Reader) -> None:
        """The first message says whether this is a rank or the launcher."""
        messages = reader.read()
        if not messages and reader.is_open:
            return
        self.selector.unregister(connection)
        if messages and "launcher" in messages[0]:
            self.launcher = connection
            self._when_readable(connection, lambda: self._read_launcher(reader))
            self.requests += messages[1:]
            return
        hello = messages[0].get("hello") if messages else None
        credentials = peer(connection)
        # A process that has another number here is in a container of its own, and cannot be monitored.
        if hello is None or (credentials is not None and credentials[0] != hello["pid"]):
            connection.close()
            self.is_over = self.launcher is None and not self.ranks
            return
        page, stacks, *others = reader.descriptors
        rank = MonitoredRank(hello, connection, reader, ProgressPage(page), stacks, next(iter(others), None))
        os.close(page)
        self.ranks.append(rank)
        self._when_readable(connection, lambda: self._read_rank(rank))
        if rank.pid_file is not None:
            self._when_readable(rank.pid_file, lambda: self._rank_ended(rank))
        for message in messages[1:]:
            self._note(rank, message)

    def _read_rank(self, rank: MonitoredRank) -> None:
        for message in rank.reader.read():
            self._note(rank, message)
        if not rank.reader.is_open:  # it has left the monitor, or has ended
            self.selector.unregister(rank.connection)
            if rank.pid_file is None:
                rank.note_death()

    def _note(self, rank: MonitoredRank, message: Message) -> None:
        rank.note(message)
        if "run_dir" in message:
            self.run_dir = message["run_dir"]
            self.before = self.before or read_report(Path(message["run_dir"]))
        elif "hang_rules" in message and sys.platform == "linux":
            self.hang_detector = self.hang_detector or HangDetector(**message["hang_rules"])

    def _rank_ended(self, rank: MonitoredRank) -> None:
        if rank.pid_file is not None:
            self.selector.unregister(rank.pid_file)
        rank.note_death()

    # What the launcher asks for.

    def _read_launcher(self, reader: Reader) -> None:
        self.requests += reader.read()
        if not reader.is_open:  # it has ended, or was killed
            self.selector.unregister(reader.connection)
            self.launcher_lost_at = time.monotonic()

    def _obey(self, request: Message) -> None:
        if "exit_codes" in request:
            for rank in self.ranks:
                rank.note_death(request["exit_codes"].get(str(rank.pid)))
            self.report = write_report(self.ranks, self.run_dir, self.options, self.before)
            assert self.launcher is not None
            with suppress(OSError):  # the launcher does not wait any more
                send(self.launcher, {"report": self.report})
        elif "over" in request:
            self.is_over = True

    # What depends on time.

    def _check(self) -> None:
        """Kill ranks that do not end, look for hangs, report where no launcher asks, end this process."""
        failed_at = [rank.failed_at for rank in self.ranks if rank.has_failed]
        if failed_at or self.launcher_lost_at is not None:  # the others must end, too
            since = min(failed_at, default=self.launcher_lost_at or 0.0)
            is_hang = any(rank.is_cause_of_hang for rank in self.ranks)
            for rank in self.ranks:
                grace = GRACE_WHILE_SAVING if rank.page.phase in ("snapshot", "disk") else GRACE_SECONDS
                if rank.takes_part and time.monotonic() - since > (GRACE_AFTER_HANG if is_hang else grace):
                    rank.kill()
        elif self.hang_detector is not None:
            self.hang_detector.look(self.ranks, self.run_dir)
        is_anyone_alive = any(rank.takes_part for rank in self.ranks)
        if self.launcher_lost_at is not None and not self.is_over:
            if self.options.temporary_folder is not None:
                shutil.rmtree(self.options.temporary_folder, ignore_errors=True)
            self.is_over = not is_anyone_alive
        elif not self.ranks and self.launcher is None:
            self.is_over = self.is_over or time.monotonic() - self.started > FIRST_RANK_SECONDS
        elif self.launcher is None:  # another program has started the ranks
            is_late = bool(failed_at) and time.monotonic() > min(failed_at) + END_SECONDS
            if failed_at and self.report is None and (is_late or all(rank.end_is_known for rank in self.ranks)):
                self._report_of_foreign_ranks()
            if not is_anyone_alive:
                self.is_over = True
                if self.options.agent is not None:
                    pid_file = open_pid_file(self.options.agent)
                    if pid_file is not None:  # torchrun's traceback comes before the report
                        select.select([pid_file], [], [], AGENT_SECONDS)
                    self._print()

    def _report_of_foreign_ranks(self) -> None:
        """Those that fail wait for the answer: the exit code, and whether they are the first."""
        self.report = write_report(self.ranks, self.run_dir, self.options, self.before)
        if self.report is None:
            return
        if self.options.agent is None:  # srun ends this process when the last rank has ended
            self._print()
        for rank in self.ranks:
            if rank.reader.is_open:
                is_first = rank.rank == self.report["first"]["rank"]
                with suppress(OSError):
                    send(rank.connection, {"exit_code": self.report["exit_code"], "is_first": is_first})

    def _print(self) -> None:
        """Show the report; the rank itself shows a sentence about its config."""
        if self.report is not None and self.report["first"]["kind"] != "config":
            with suppress(OSError):  # nobody reads stderr any more
                print(screen(self.report), file=sys.stderr, flush=True)


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
