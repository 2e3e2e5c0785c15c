"""Which addresses processes listen at, by Linux' /proc."""

import ipaddress
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from support.commands import children

LISTEN = "0A"  # the state's number in /proc/net/tcp


def listening_addresses(pids: Iterable[int]) -> dict[str, int]:
    """{"127.0.0.1:29500": pid} of the TCP sockets at which these processes listen."""
    found = {}
    for pid in pids:
        with suppress(OSError):  # the process has ended
            own = _sockets_of(pid)
            for place, inode in _listening(pid):
                if inode in own:
                    found[place] = pid
    return found


def is_loopback(place: str) -> bool:
    """Whether "address:port" is reached from this machine only."""
    address = ipaddress.ip_address(place.rpartition(":")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def descendants(pid: int) -> list[int]:
    """This process and all below it."""
    found = [pid]
    with suppress(OSError):
        for child in children(pid):
            found += descendants(child)
    return found


def _sockets_of(pid: int) -> set[str]:
    names = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            names.add(os.readlink(descriptor))
    return names


def _listening(pid: int) -> Iterable[tuple[str, str]]:
    """(address:port, socket:[inode]) of every socket that listens in the network namespace of `pid`."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTEN:
                address, port = columns[1].split(":")
                yield f"{_address(address)}:{int(port, 16)}", f"socket:[{columns[9]}]"


def _address(digits: str) -> str:
    """The kernel prints words of 32 bits in the machine's byte order."""
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
