"""Ports for tests."""

import itertools
import os
import socket
from contextlib import suppress

_numbers = itertools.count()


def free_port() -> int:
    """A free port below those that the kernel gives out, so that no other process gets it before it is used.

    Test processes that run side by side take it from ranges of their own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + 1000 * (worker % 10) + next(_numbers) % 1000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
