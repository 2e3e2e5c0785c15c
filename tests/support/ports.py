"""Ports for tests."""

import itertools
import socket
from contextlib import suppress
from functools import cache

BLOCKS = range(20_000, 32_000, 200)  # below the ports that the kernel gives out by itself


def free_port():
    """A free port that no other process gets before it is used, also of another pytest command."""
    held, numbers = _block()
    while True:
        port = held.getsockname()[1] + 1 + next(numbers) % (BLOCKS.step - 1)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@cache
def _block():
    """A socket at the first port of the block that this process has as long as it lives."""
    for start in BLOCKS:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", start)), itertools.count()
    raise AssertionError("other processes hold all ports for tests")
