"""Waits for the ranks' store. They end after a time, and a signal can end them. No torch here.

torch's own waits block in C: a signal has no effect there, and a name that does not exist is tried for five minutes.
"""

import contextlib
import socket
import sys
import time
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError, RankMissing

if TYPE_CHECKING:
    from torch.distributed import Store

NAME_SECONDS = 20.0  # for a host name to appear: a cluster may register a pod's name after it has started the pod
NOTICE_SECONDS = 5.0  # of silence
TRY_SECONDS = 1.0  # for one connection
PAUSE_SECONDS = 0.1
FIRST_PAUSE = 0.005  # a launcher of this project listens a few ms after it has forked its ranks


def wait_until_known(address: str, timeout: float) -> None:
    """Wait until the name of a host is known, NAME_SECONDS or `timeout` seconds at most. Raises ConfigError."""
    deadline = time.monotonic() + min(NAME_SECONDS, timeout)
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the host {address} of rank 0 is not known on this machine ({error.strerror}); "
                    f"type MASTER_ADDR=<its name or address> before the command, or launch.master_addr="
                ) from None
        time.sleep(PAUSE_SECONDS)


def wait_until_listening(address: str, port: int, timeout: float) -> None:
    """Wait until a program accepts connections at `port` of the host `address`, `timeout` seconds at most.

    Raises ConfigError if the name of the host is not known, and RankMissing.
    """
    wait_until_known(address, timeout)
    start, noticed = time.monotonic(), False
    while True:
        try:
            socket.create_connection((address, port), timeout=TRY_SECONDS).close()
            return
        except OSError as error:
            problem = error.strerror or str(error)
        waited = time.monotonic() - start
        if waited > timeout:
            raise RankMissing(
                f"rank 0 does not listen at {address}:{port} within backend.timeout ({problem}); type the same command "
                f"on every node, and MASTER_ADDR=<the host of rank 0> before it"
            )
        if not noticed and waited > NOTICE_SECONDS:
            noticed = True
            _notice(f"waits for rank 0 to listen at {address}:{port} ({problem})")
        time.sleep(min(max(waited, FIRST_PAUSE), PAUSE_SECONDS))


def wait_for_key(store: "Store", key: str, timeout: float, complaint: str) -> str:
    """The value of `key` once another rank has set it. Raises RankMissing with `complaint` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    # Not store.wait(): torch prints two warnings for each of its timeouts, and Ctrl-C has no effect while it waits.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RankMissing(f"{complaint} within backend.timeout; type the same command on every node")
        time.sleep(PAUSE_SECONDS)
    return store.get(key).decode()


def _notice(words: str) -> None:
    with contextlib.suppress(OSError):
        print(f"lockstep: {words}", file=sys.stderr, flush=True)
