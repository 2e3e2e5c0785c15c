"""The connection between the monitor and the processes that it serves: lines of JSON over a Unix socket."""

import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Message = dict[str, Any]
LARGEST_LINE = 2**22  # bytes of one message
RETRY_SECONDS = 0.01


def address_of(name: str) -> str:
    """The address of the monitor of a run. On Linux it is abstract: it leaves no file and ends with its process."""
    if sys.platform == "linux":
        return f"\0lockstep-{name}"
    return str(Path(tempfile.gettempdir(), f"lockstep-{name}"))


def listen(address: str) -> socket.socket:
    """A socket that takes connections at `address`. Raises OSError if another monitor listens there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: str, timeout: float) -> socket.socket | None:
    """A connection to the monitor at `address`; None if nothing listens there within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                return None
            time.sleep(RETRY_SECONDS)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this process's user, or to root."""
    peer = _peer(connection)
    return peer is None or peer[1] in (os.getuid(), 0)  # else the file of the socket has the user's own permissions


def peer_pid(connection: socket.socket) -> int | None:
    """The number of the process at the other end, as this process sees it: 0 in a container of its own.

    None where the system does not tell.
    """
    peer = _peer(connection)
    return None if peer is None else peer[0]


def _peer(connection: socket.socket) -> tuple[int, int] | None:
    """(process, user) at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


def send(connection: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message. descriptors: open files that the other process shall have, too. Raises OSError."""
    line = json.dumps(message).encode() + b"\n"
    if descriptors:
        sent = socket.send_fds(connection, [line], list(descriptors))
        line = line[sent:]
    connection.sendall(line)


class Reader:
    """Cuts what arrives on a connection into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.rest = connection, b""
        self.descriptors: list[int] = []  # files that came with the messages
        self.is_open = True

    def read(self) -> list[Message]:
        """The messages that have arrived. Waits for the first bytes if there are none. `is_open` tells the end."""
        data = self._receive()
        return [] if data is None else self._messages(data)

    def read_rest(self) -> list[Message]:
        """All messages that have arrived. Does not wait: a child of a dead process may keep its connection open."""
        self.connection.setblocking(False)
        messages = []
        while self.is_open and (data := self._receive()) is not None:
            messages += self._messages(data)
        return messages

    def _receive(self) -> bytes | None:
        """What has arrived: b"" at the end of the connection, None if nothing is there yet."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, 2**16, 8)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError:
            return b""
        self.descriptors += descriptors
        return data

    def _messages(self, data: bytes) -> list[Message]:
        """The messages that `data` completes."""
        self.is_open = bool(data) and len(self.rest) < LARGEST_LINE
        *lines, self.rest = (self.rest + data).split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                messages.append(json.loads(line))
        return messages

    def wait_for(self, key: str, seconds: float, **values: Any) -> Message | None:
        """The first message that has `key` and these `values`, None if none comes within `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            while self.is_open and (left := deadline - time.monotonic()) > 0:
                self.connection.settimeout(left)
                for message in self.read():
                    if key in message and values.items() <= message.items():
                        return message
            return None
        finally:
            self.connection.settimeout(None)
