"""A thread that writes snapshots while training goes on."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundWriter:
    """Runs writes in one thread, in order, and is never more than `max_pending` writes behind."""

    def __init__(self, max_pending: int) -> None:
        self.thread = ThreadPoolExecutor(1, "snapshots")
        self.max_pending = max_pending
        self.pending: deque[Future[None]] = deque()

    def put(self, write: Callable[..., None], *args: Any) -> None:
        """Run write(*args) later. Waits for the oldest if `max_pending` are pending: each holds a copy in memory.

        Raises what an earlier write raised.
        """
        while len(self.pending) >= self.max_pending:
            self.pending.popleft().result()
        self.pending.append(self.thread.submit(write, *args))

    def drain(self) -> None:
        """Wait until everything is written. Raises what a write raised."""
        while self.pending:
            self.pending.popleft().result()

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        try:
            self.drain()
        finally:
            self.thread.shutdown()
