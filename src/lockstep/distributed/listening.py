"""Where this machine listens: at the loopback address if all ranks are here, else where the other machines reach it.

No torch here.
"""

import errno
import ipaddress
import socket

from lockstep.distributed.environment import RankInfo

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # ranks that connect at the same time; Linux takes the smaller of this and net.core.somaxconn


def on_one_machine(info: RankInfo) -> bool:
    """Whether all ranks are known to be on this machine, so that nothing needs to listen beyond it.

    Where the starter need not say how many ranks a machine has, only a loopback address shows it.
    """
    known = info.started_by not in ("environment", "mpirun") or is_loopback(info.master_addr)
    return known and info.local_world_size >= info.world_size


def store_address(info: RankInfo) -> str:
    """Where ranks find their store: on one machine at the loopback address, whatever name the machine has.

    A store that the starter hosts stays where the starter says.
    """
    if not info.agent_store and (on_one_machine(info) or is_loopback(info.master_addr)):
        return LOOPBACK
    return info.master_addr


def is_loopback(address: str) -> bool:
    """Whether `address` is localhost or a number such as 127.0.0.1. A name may mean another address elsewhere."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback_interface() -> str | None:
    """The name of the loopback interface: lo on Linux, lo0 on macOS. None if there is none."""
    present = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in present), None)


def listening_socket(address: str, port: int) -> socket.socket:
    """A TCP socket that listens at `address` alone; at every interface if other machines may reach it elsewhere.

    They may if `address` is a name with several addresses, or one that is a loopback address only on this machine, or
    if no interface here has the address, as behind a forwarded port. Port 0 takes a free one. Raises OSError, with
    EADDRINUSE for a port that another program uses.
    """
    family, host = _own_address(address)
    if host is not None:
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def _own_address(address: str) -> tuple[int, str | None]:
    """(address family, the one number behind `address`). The number is None if all ranks may not share it."""
    if address == "localhost":
        return socket.AF_INET, LOOPBACK
    try:
        infos = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:  # an unknown name: connecting to it fails with an error that says so
        return socket.AF_INET, None
    family, number = min((int(family), str(place[0])) for family, _, _, _, place in infos)
    is_shared = len(infos) == 1 and (is_loopback(address) or not is_loopback(number))
    return family, number if is_shared else None
