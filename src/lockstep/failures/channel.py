"""How a rank and its monitor talk: lines of JSON over a Unix socket, and a page of memory that both see."""

import contextlib
import json
import mmap
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


SIZE = 4096
NUMBER, SECONDS = struct.Struct("=q"), struct.Struct("=d")
PHASES = (
    *("start", "meeting", "prepare", "build", "resume"),
    *("train", "evaluation", "snapshot", "disk", "export", "end", "mode"),
)
COLLECTIVES = ("", "shared_memory_sum")  # those that torch's flight recorder does not see
NOBODY = -1

# Offsets in the page, in bytes. All times are those of time.monotonic(), one clock for all processes of a machine.
EPOCH, STEP, STEPS_ENDED, STEP_ENDED_AT = 0, 8, 16, 24
PHASE, PHASE_SINCE = 32, 40
COLLECTIVE, VALUES, WAITS_FOR = 48, 56, 64
HEARTBEAT_AT = 72


def create_page_file() -> int:
    """A file of `SIZE` zero bytes that has no name, so it leaves nothing behind. Returns its descriptor."""
    file = create_unnamed_file("lockstep-page")
    os.ftruncate(file, SIZE)
    return file


def create_unnamed_file(name: str) -> int:
    """An empty file without a place in any folder. Returns its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class ProgressPage:
    """The page in the file `descriptor`, as both sides see it. Each field is written whole, so no lock is needed."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, SIZE)

    def get(self, field: int) -> int:
        value: int = NUMBER.unpack_from(self.memory, field)[0]
        return value

    def get_time(self, field: int) -> float:
        value: float = SECONDS.unpack_from(self.memory, field)[0]
        return value

    def set(self, field: int, value: int) -> None:
        NUMBER.pack_into(self.memory, field, value)

    def set_time(self, field: int, value: float) -> None:
        SECONDS.pack_into(self.memory, field, value)

    @property
    def phase(self) -> str:
        """What the rank does, one of PHASES."""
        return PHASES[self.get(PHASE)]

    def enter(self, phase: str) -> None:
        """The rank does something else from now on. phase: one of PHASES."""
        self.set_time(PHASE_SINCE, time.monotonic())
        self.set(PHASE, PHASES.index(phase))

    def step_ended(self, epoch: int, step: int) -> None:
        """epoch: counted from 1. step: optimizer steps done."""
        self.set(EPOCH, epoch)
        self.set(STEP, step)
        self.set_time(STEP_ENDED_AT, time.monotonic())
        self.set(STEPS_ENDED, self.get(STEPS_ENDED) + 1)

    def heartbeat(self) -> None:
        """A piece of the phase's work is done, such as a batch of an evaluation."""
        self.set_time(HEARTBEAT_AT, time.monotonic())

    @property
    def last_step_end(self) -> float:
        return self.get_time(STEP_ENDED_AT)

    @property
    def last_progress(self) -> float:
        """When the rank last ended a step or another piece of work, or entered a phase."""
        return max(self.get_time(field) for field in (STEP_ENDED_AT, PHASE_SINCE, HEARTBEAT_AT))

    def collective_starts(self, name: str, values: int) -> None:
        """name: one of COLLECTIVES. values: how many numbers the collective is about."""
        self.set(VALUES, values)
        self.set(WAITS_FOR, NOBODY)
        self.set(COLLECTIVE, COLLECTIVES.index(name))

    def waits_for(self, rank: int) -> None:
        """The rank that the collective waits for."""
        self.set(WAITS_FOR, rank)

    def collective_ends(self) -> None:
        self.set(COLLECTIVE, 0)
