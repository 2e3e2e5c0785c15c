"""Which addresses processes listen at, by Linux' /proc."""

import ipaddress
import os
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"  # the state's number in /proc/net/tcp


def listening_addresses(pids):
    """{"127.0.0.1:29500"} of the TCP sockets at which these processes listen."""
    found = set()
    for process in (Path(f"/proc/{pid}") for pid in pids):
        with suppress(OSError):  # it has ended, or closed a file
            own = {os.readlink(descriptor) for descriptor in (process / "fd").iterdir() if descriptor.is_symlink()}
            lines = [line for table in ("tcp", "tcp6") for line in (process / "net" / table).read_text().splitlines()]
            for _, local, _, state, *rest in map(str.split, lines):
                if state == LISTEN and f"socket:[{rest[5]}]" in own:
                    address, port = local.split(":")
                    found.add(f"{_address(address)}:{int(port, 16)}")
    return found


def is_loopback(place):
    """Whether "address:port" is reached from this machine only."""
    address = ipaddress.ip_address(place.rpartition(":")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _address(digits):
    """The kernel prints words of 32 bits in the machine's byte order."""
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
