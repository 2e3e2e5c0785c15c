"""Signals that ask a run to stop. A handler only sets a flag; the ranks agree on it at a step, save, and exit together.

No torch here.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: Slurm's warning before the time limit
REPEAT_AFTER = 2.0  # seconds: one Ctrl-C can arrive twice, from the terminal and from the launcher

_requested_at: float | None = None  # by the monotonic clock


def listen() -> None:
    """From here on SIGTERM, SIGINT and SIGUSR1 request a stop. A second SIGTERM or SIGINT ends the process at once."""
    for number in STOP_SIGNALS:
        signal.signal(number, _request_stop)


def stop_listening() -> None:
    """Ignore these signals: this rank is about to exit. srun sends SIGTERM to all ranks when the first one exits, and
    that must not change an exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stop_requested() -> bool:
    return _requested_at is not None


@contextmanager
def forwarded_to(pids: Sequence[int]) -> Iterator[None]:
    """While the block runs, send the signals that request a stop on to the processes `pids`."""

    def forward(number: int, frame: FrameType | None) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _request_stop(number: int, frame: FrameType | None) -> None:
    global _requested_at
    now = time.monotonic()
    if _requested_at is None:
        _requested_at = now
    elif number != signal.SIGUSR1 and now - _requested_at > REPEAT_AFTER:
        os._exit(128 + number)
