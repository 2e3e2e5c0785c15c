"""Where the store of the ranks listens, and where their gloo group does."""

import os
import socket
from typing import Any

import pytest

from lockstep.distributed.environment import RankInfo
from lockstep.distributed.rendezvous import (
    close_store,
    hold_port,
    listening_socket,
    on_one_machine,
    shared_store,
    store_address,
)
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from support.sockets import is_loopback, listening_addresses
from support.worlds import in_world


def own_listeners() -> set[str]:
    return set(listening_addresses([os.getpid()]))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("203.0.113.9", "::"),  # no interface here has it, as behind a forwarded port
        ("a-name-that-nobody-has.invalid", "::"),
    ],
)
def test_a_socket_listens_at_its_address_alone_where_that_is_known(address: str, expected: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with listening_socket(address, 0) as listener:
        assert listener.getsockname()[0] == expected


def test_a_name_that_means_loopback_on_this_machine_only_is_no_known_address() -> None:
    """Debian gives a host's own name a loopback address in /etc/hosts. Other machines know it by another one."""
    name = socket.gethostname()
    numbers = {place[4][0] for place in socket.getaddrinfo(name, None)}
    if not any(is_loopback(f"{number}:0") for number in numbers):
        pytest.skip(f"{name} has no loopback address here")
    with listening_socket(name, 0) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def info(**changes: Any) -> RankInfo:
    defaults = {"world_size": 2, "local_world_size": 2, "started_by": "torchrun", "master_addr": "node7"}
    return RankInfo(**(defaults | {"master_port": 29500} | changes))


@pytest.mark.parametrize(
    ("here", "one_machine", "address"),
    [
        (info(), True, "127.0.0.1"),
        (info(started_by="srun"), True, "127.0.0.1"),
        (info(started_by="spawn", master_addr="10.0.0.5"), True, "127.0.0.1"),
        (info(agent_store=True), True, "node7"),
        (info(local_world_size=1), False, "node7"),
        (info(started_by="environment"), False, "node7"),  # a starter that does not say how many ranks a machine has
        (info(started_by="environment", master_addr="localhost"), True, "127.0.0.1"),
        (info(started_by="mpirun"), False, "node7"),
        (info(started_by="mpirun", master_addr="127.0.0.1"), True, "127.0.0.1"),
        (info(started_by="spawn", local_world_size=1, master_addr="10.0.0.5"), False, "10.0.0.5"),
    ],
)
def test_what_is_known_of_the_machines_of_a_world(here: RankInfo, one_machine: bool, address: str) -> None:
    assert (on_one_machine(here), store_address(here)) == (one_machine, address)


def test_the_store_of_one_machine_listens_at_the_loopback_address() -> None:
    before = own_listeners()
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken .* type MASTER_PORT={port + 1}"):
            shared_store(info(master_port=port))
    here = info(master_port=port)
    shared_store(here).set("key", "value")
    assert own_listeners() - before == {f"127.0.0.1:{port}"}
    assert shared_store(info(rank=1, master_port=port)).get("key") == b"value"
    close_store(here)
    close_store(info(rank=1, master_port=port))
    assert own_listeners() == before


def test_a_held_port_is_taken_until_its_store_is_closed() -> None:
    before = own_listeners()
    for opens in (True, False):
        here = hold_port(info(master_port=0))
        place = f"127.0.0.1:{here.master_port}"
        assert own_listeners() - before == {place}
        with pytest.raises(OSError, match="Address already in use"):
            listening_socket("127.0.0.1", here.master_port)
        if opens:
            shared_store(here).set("key", "value")
            assert own_listeners() - before == {place}
        close_store(here)
        assert own_listeners() == before


def _listeners_of_a_world() -> set[str]:
    with join_world("gloo", 30) as world:
        world.barrier()
        return own_listeners()


def test_gloo_of_one_machine_listens_at_the_loopback_address() -> None:
    for found in in_world(2, _listeners_of_a_world):
        assert found
        assert all(map(is_loopback, found))
