"""The spares of launch.recover=live: processes that have loaded their data and wait to become a rank."""

import logging
import time
from collections.abc import Callable

from lockstep.launchers.live_process import LiveProcess

log = logging.getLogger(__name__)

PAUSE = 0.5  # seconds in which the ranks go on before another spare takes time from them
FIRST_RETRY, LAST_RETRY = 0.5, 60.0  # seconds after a spare that ended before another is started, doubled each time


class Spares:
    """One spare, or as many as ranks are missing. While spares fail they are tried one by one.

    start: starts a process, or raises OSError or EOFError.
    """

    def __init__(self, start: Callable[[], LiveProcess]) -> None:
        self.start = start
        self.processes: list[LiveProcess] = []
        self.next_at, self.retry = 0.0, FIRST_RETRY

    @property
    def ready(self) -> list[LiveProcess]:
        return [process for process in self.processes if process.is_ready]

    def supply(self, missing: int) -> None:
        """Start spares if it is time. missing: how many ranks there are too few."""
        while self.due(missing) and time.monotonic() >= self.next_at:
            try:
                self.processes.append(self.start())
            except (OSError, EOFError) as error:
                self._failed(f"a spare rank cannot be started: {error}")

    def due(self, missing: int) -> list[float]:
        """When the next one is started; empty if there are enough. By the monotonic clock."""
        wanted = max(1, missing) if self.retry == FIRST_RETRY else 1
        return [self.next_at] if len(self.processes) < wanted else []

    def pause(self) -> None:
        """The ranks go on: the next spare has time."""
        self.next_at = max(self.next_at, time.monotonic() + PAUSE)

    def hurry(self) -> None:
        """A rank is dead: the next spare is started at once, unless the last one failed."""
        if self.retry == FIRST_RETRY:
            self.next_at = 0.0

    def receive(self) -> None:
        """Note which spares are ready, and which have ended."""
        for spare in list(self.processes):
            for error in spare.receive():
                spare.is_ready, spare.error = error is None, error or ""
            if spare.is_ready:
                self.retry = FIRST_RETRY
            if spare.code is not None:
                self.processes.remove(spare)
                spare.connection.close()
                self._failed(f"the spare rank ended (exit {spare.code}) {spare.error}".rstrip())

    def _failed(self, what: str) -> None:
        log.warning("%s; another one is started in %g s", what, self.retry)
        self.next_at, self.retry = time.monotonic() + self.retry, min(2 * self.retry, LAST_RETRY)
