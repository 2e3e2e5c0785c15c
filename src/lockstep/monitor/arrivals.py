"""The connections that ranks and the launcher open to the monitor, until their first message is read."""

import selectors
import socket
from collections.abc import Callable, Sequence

from lockstep.monitor.channel import Message, Reader, is_same_user

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
