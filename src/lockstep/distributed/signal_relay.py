"""In the process that starts ranks: signals that ask a run to stop are passed on to the ranks. No torch here."""

import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Self

from lockstep.distributed.signals import STOP_SIGNALS, first_request, handle_signals, is_repeated


class Relay:
    """In the process that starts ranks: while the block runs, the signals that ask for a stop go on to the ranks.

    pids: the ranks. first, second: the numbers of the first signal and of a repeated one, None if there was none.
    first_at, second_at: when they came, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.first: int | None = None
        self.second: int | None = None
        self.first_at = self.second_at = 0.0

    def start(self, pids: list[int]) -> None:
        """The ranks have started. A signal that came before is sent now to those of them that have not got it."""
        new, self.pids = [pid for pid in pids if pid not in self.pids], pids
        if self.first is not None:
            self.send(self.first, new)

    def __enter__(self) -> Self:
        self.before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        handle_signals(self._pass_on)
        request = first_request()
        if request is not None:  # SIGUSR1, which Slurm sends, ends no process before the training
            self.first, self.first_at = request
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self.first_at = number, time.monotonic()
        elif self.second is None and is_repeated(self.first_at, number):
            self.second, self.second_at = number, time.monotonic()
        self.send(number, self.pids)

    def send(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
