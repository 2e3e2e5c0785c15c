"""The ranks of a run with launch.recover=live: which processes they are, and what becomes of them when one dies.

All processes are forked from a clean helper process that has imported everything. A spare waits beside the ranks, with
its data loaded. When a rank dies, the spare gets its number. If no spare is ready in time, the others go on without it.
"""

import logging
import mmap
import multiprocessing
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from lockstep.distributed.generations import (
    GROWN,
    LOSS,
    MEET_AGAIN,
    OVER,
    WAITS,
    Generation,
    Notice,
    has_finished,
    has_recovered,
    publish,
)
from lockstep.distributed.loss_pages import PAGE_BYTES, PAGE_ROWS
from lockstep.distributed.signal_relay import Relay
from lockstep.errors import EXIT_FAILED, EXIT_HANG
from lockstep.launchers.live_process import LiveProcess, require_room_for_process, run_live_rank
from lockstep.launchers.live_spares import Spares
from lockstep.launchers.stopping import STOP_EXITS, wait_for_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

DEATHS_PER_STEP = 3  # of each rank, without a step between them, after which the run fails
SIGNAL_EXIT = 128  # a process that ends by itself because of signal n exits with 128 + n
GRACE = 5.0  # seconds for the other ranks to end after a failure


class LiveWorld:
    """`size` ranks, the spares, and the generation that the ranks form.

    replace_within: seconds that the others wait for a new rank. pages: of the ranks. job: what a process takes,
    (environment, worker, args). relay: of signals. value: of rank 0.
    """

    def __init__(
        self,
        context: Any,
        size: int,
        replace_within: float,
        store: "Store",
        pages: mmap.mmap,
        job: tuple[Any, ...],
        relay: Relay,
    ) -> None:
        self.context, self.size, self.replace_within = context, size, replace_within
        self.store, self.pages, self.notice, self.job, self.relay = store, pages, Notice(pages), job, relay
        self.numbers = count()
        self.spares = Spares(self._start)
        self.places: list[LiveProcess | None] = [self._start() for _ in range(size)]  # None: nobody is this rank now
        self.lost: list[LiveProcess] = []  # dead ranks of the newest generation
        self.lost_at = 0.0
        self.meets_again = False  # the ranks have lost their connections, and none of them is dead
        self.generation = Generation()
        self.deaths_at = (-1, 0)  # (step, deaths since this step ended)
        self.value: Any = None
        self.has_finished = False  # all ranks have finished their work

    @property
    def ranks(self) -> list[LiveProcess]:
        """The ranks of the newest generation, in their order."""
        return [process for process in self.places if process is not None]

    @property
    def missing(self) -> int:
        """How many ranks there are too few."""
        return self.size - len(self.ranks) + len(self.lost)

    def supervise(self) -> Iterator[list[int]]:
        """Until all ranks have ended, or one has failed. Yields the pids of dead ranks that the others do without."""
        self._publish(LOSS)
        while True:
            dead = [process for process in self.ranks if process.code is not None]
            new = [process for process in dead if process not in self.lost]
            if new and self._is_ending(dead):
                if not self.has_finished:
                    self.notice.write(self.generation.number, OVER)  # nobody waits for a rank that does not come
                wait_for_ranks([process.process for process in self.ranks], self.relay)
                self._receive()
                return
            if new and ({EXIT_FAILED, EXIT_HANG} & set(codes(new)) or not self._can_go_on(len(new))):
                return
            if new:
                self._note_loss(new)
            self.spares.supply(self.missing)
            pids = [process.process.pid for process in self.lost]
            if self._can_publish():
                self._publish(GROWN if self._grows() else LOSS)
                yield pids
            elif self._is_late() and len(self.lost) == len(self.ranks):
                return
            self._wait()

    def end(self) -> list[int]:
        """End all processes: the ranks, which may still have to close their files, and the spares.

        Returns the ranks' exit codes; -SIGTERM for those that had not ended.
        """
        self.notice.write(self.generation.number, OVER)
        alive = [process for process in self.ranks if process.code is None]
        exit_codes = [-signal.SIGTERM if process in alive else process.code or 0 for process in self.ranks]
        for process in alive:
            process.process.terminate()
        deadline = time.monotonic() + GRACE
        for process in (*alive, *self.spares.processes):
            process.process.join(max(0.0, deadline - time.monotonic()) if process in alive else 0)
            process.process.kill()
            process.process.join()
        for process in (*self.ranks, *self.spares.processes):
            process.connection.close()
        return exit_codes

    def _start(self) -> LiveProcess:
        """A process that waits for its rank. Raises OSError if the limit of processes allows no more."""
        require_room_for_process()
        ours, theirs = multiprocessing.Pipe()
        number = next(self.numbers)
        process = self.context.Process(target=run_live_rank, args=(number, theirs, *self.job))
        process.start()
        theirs.close()
        return LiveProcess(number, process, ours)

    def _note_loss(self, dead: list[LiveProcess]) -> None:
        self.lost += dead
        self.lost_at = self.lost_at or time.monotonic()
        self.notice.write(self.generation.number, WAITS)
        self.spares.hurry()

    def _is_late(self) -> bool:
        return bool(self.lost) and time.monotonic() >= self.lost_at + self.replace_within

    def _can_publish(self) -> bool:
        """Whether another generation follows now: enough spares are there, or the others have waited long enough."""
        ready = len(self.spares.ready)
        if self.lost:
            goes_on = ready > 0 or len(self.lost) < len(self.ranks)
            return ready >= len(self.lost) or (self._is_late() and goes_on)
        return (self.meets_again or self._grows()) and not has_finished(self.store, self.generation, lost=True)

    def _grows(self) -> bool:
        """Whether a smaller world trains on, and a new rank is ready."""
        return not self.lost and self.missing > 0 and bool(self.spares.ready) and self.relay.first is None

    def _publish(self, reason: str) -> None:
        """Give the places of lost ranks to spares, and tell all ranks who is which rank."""
        size_before, before = len(self.ranks), self.generation
        lost = [] if has_recovered(self.store, before) else before.lost
        lost = lost + [f"rank {self.ranks.index(one)} (pid {one.process.pid}, exit {one.code})" for one in self.lost]
        new, said = self._fill_places()
        numbers, changed_at = [process.number for process in self.ranks], self.lost_at or time.monotonic()
        self.generation = Generation(before.number + 1, numbers, self.size, changed_at, reason, lost)
        publish(self.store, self.notice, self.generation)
        self.relay.start([process.process.pid for process in self.ranks])
        for process in new if self.generation.number else self.ranks:
            with suppress(OSError):  # it is dead, which is noticed like any death
                process.connection.send(None)
        for process in self.lost:
            process.connection.close()
        self.lost, self.lost_at, self.meets_again = [], 0.0, False
        self.spares.pause()
        if len(self.ranks) != size_before:
            said.append(f"the run goes on with {len(self.ranks)} of {self.size} ranks")
        for line in said:
            log.warning("%s", line)

    def _fill_places(self) -> tuple[list[LiveProcess], list[str]]:
        """Put spares in the places that are free. Returns them, and what happened to each place."""
        before, ready, new, said = self.ranks, self.spares.ready, [], []
        for place, process in enumerate(self.places):
            if process is not None and process not in self.lost:
                continue
            spare = self.places[place] = ready.pop(0) if ready else None
            taken = "no process" if spare is None else f"process {spare.process.pid}"
            if process is not None:
                said.append(f"rank {before.index(process)} ended (exit {process.code}); {taken} takes its place")
            elif spare is not None:
                said.append(f"{taken} is a new rank")
            if spare is not None:
                new.append(spare)
                self.spares.processes.remove(spare)
        return new, said

    def _wait(self) -> None:
        """Wait until a process ends or sends something, or until it is time to go on without it."""
        # All of them: one that has ended since the last look must not be left out.
        alive = [process for process in (*self.ranks, *self.spares.processes) if process not in self.lost]
        connections = [process.connection for process in alive]
        times = [self.lost_at + self.replace_within] if self.lost else []
        times += self.spares.due(self.missing)
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        wait([*(process.process.sentinel for process in alive), *connections], timeout)
        self._receive()

    def _receive(self) -> None:
        """Take rank 0's value, and what the ranks and the spares say of themselves."""
        for rank in self.ranks:
            for message in rank.receive():
                if message == (MEET_AGAIN, self.generation.number):
                    self.meets_again = self.meets_again or self._can_go_on(1)
                elif rank is self.ranks[0] and not isinstance(message, tuple):
                    self.value = message
        self.spares.receive()

    def _is_ending(self, dead: list[LiveProcess]) -> bool:
        """Whether the run has finished, or stops: a rank that dies now is not missed."""
        self.has_finished = has_finished(self.store, self.generation, lost=True)
        stops = any(code in STOP_EXITS or code > SIGNAL_EXIT for code in codes(dead))
        return stops or self.relay.first is not None or self.has_finished

    def _can_go_on(self, deaths: int) -> bool:
        """Whether the run gets on in spite of its deaths, with as many new ones as this."""
        step = self._last_step()
        deaths += self.deaths_at[1] if step == self.deaths_at[0] else 0
        self.deaths_at = step, deaths
        return deaths <= DEATHS_PER_STEP * self.size

    def _last_step(self) -> int:
        """The last step that a rank has begun, read from the ranks' pages."""
        rows = struct.iter_unpack(f"{PAGE_BYTES // 8 // PAGE_ROWS}d", self.pages[: self.size * PAGE_BYTES])
        return int(max(row[0] for row in rows))


def codes(processes: list[LiveProcess]) -> list[int]:
    """The exit codes of processes that have ended."""
    return [process.code or 0 for process in processes]
