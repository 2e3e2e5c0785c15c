"""How a rank and its monitor talk: lines of JSON over a Unix socket, and a page of memory that both see."""

import json
import mmap
import os
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

Message = dict[str, Any]
LARGEST_LINE = 2**22  # bytes of one message
RETRY_SECONDS = 0.01
REPORT_SECONDS = 4.0  # for the monitor's report. It kills ranks some time after a failure, also those that wait


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


def peer(connection: socket.socket) -> tuple[int, int] | None:
    """(process, user) at the other end; None where the system does not tell.

    The process has the number that this process sees: 0 for one in a container of its own.
    """
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
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, 2**16, 8)
        except TimeoutError:
            return []
        except OSError:
            data, descriptors = b"", []
        self.descriptors += descriptors
        self.is_open = bool(data) and len(self.rest) < LARGEST_LINE
        *lines, self.rest = (self.rest + data).split(b"\n")
        messages = []
        for line in lines:
            with suppress(ValueError):
                messages.append(json.loads(line))
        return messages

    def wait_for(self, key: str) -> Message | None:
        """The first message that has `key`, None if none comes within REPORT_SECONDS."""
        deadline = time.monotonic() + REPORT_SECONDS
        try:
            while self.is_open and (left := deadline - time.monotonic()) > 0:
                self.connection.settimeout(left)
                for message in self.read():
                    if key in message:
                        return message
            return None
        finally:
            self.connection.settimeout(None)


SIZE = 4096
NUMBER, SECONDS = struct.Struct("=q"), struct.Struct("=d")
STEP_FIELDS = struct.Struct("=qqqd")  # from EPOCH to STEP_ENDED_AT
PHASES = (
    *("start", "meeting", "prepare", "build", "resume"),
    *("train", "evaluation", "snapshot", "disk", "export", "end", "mode"),
)

# Offsets in the page, in bytes. All times are those of time.monotonic(), one clock for all processes of a machine.
EPOCH, STEP, STEPS_ENDED, STEP_ENDED_AT = 0, 8, 16, 24
PHASE, PHASE_SINCE = 32, 40
SUM_VALUES = 48  # of a sum through shared memory that has not ended: torch's flight recorder does not see it
HEARTBEAT_AT = 56


def create_unnamed_file(name: str, size: int = 0) -> int:
    """A file of `size` zero bytes that has no name, so it leaves nothing behind. Returns its descriptor."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file


class ProgressPage:
    """Memory in which a rank notes what it does, and which its monitor reads without asking the rank.

    memory: the descriptor of a file of SIZE bytes that both sides map; a bytearray if nobody else reads it.
    Each field is written whole, so no lock is needed.
    """

    def __init__(self, memory: int | bytearray) -> None:
        self.memory = mmap.mmap(memory, SIZE) if isinstance(memory, int) else memory

    def get(self, field: int) -> int:
        value: int = NUMBER.unpack_from(self.memory, field)[0]
        return value

    def get_time(self, field: int) -> float:
        value: float = SECONDS.unpack_from(self.memory, field)[0]
        return value

    def set(self, field: int, value: int) -> None:
        NUMBER.pack_into(self.memory, field, value)

    def set_time(self, field: int) -> None:
        SECONDS.pack_into(self.memory, field, time.monotonic())

    @property
    def phase(self) -> str:
        """What the rank does, one of PHASES."""
        return PHASES[self.get(PHASE)]

    def enter(self, phase: str) -> None:
        """The rank does something else from now on. phase: one of PHASES."""
        self.set_time(PHASE_SINCE)
        self.set(PHASE, PHASES.index(phase))

    def step_ended(self, epoch: int, step: int) -> None:
        """epoch: counted from 1. step: optimizer steps done."""
        ended = NUMBER.unpack_from(self.memory, STEPS_ENDED)[0] + 1
        STEP_FIELDS.pack_into(self.memory, EPOCH, epoch, step, ended, time.monotonic())

    @property
    def last_progress(self) -> float:
        """When the rank last ended a step or another piece of work, or entered a phase."""
        return max(self.get_time(field) for field in (STEP_ENDED_AT, PHASE_SINCE, HEARTBEAT_AT))
