"""Where the store of the ranks listens, and where their gloo group does."""

import os
import socket
from dataclasses import replace
from typing import Any

import pytest

from lockstep.distributed.environment import RankInfo
from lockstep.distributed.rendezvous import shared_store, store_address
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from support.sockets import is_loopback, listening_addresses
from support.worlds import in_world


def own_listeners() -> set[str]:
    return set(listening_addresses([os.getpid()]))


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
    assert (here.on_one_machine, store_address(here)) == (one_machine, address)


@pytest.mark.parametrize(("local", "address"), [(2, "127.0.0.1"), (1, "::")])
def test_the_store_of_one_machine_listens_at_the_loopback_address(local: int, address: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    before = own_listeners()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken .* type MASTER_PORT={port + 1}"):
            shared_store(info(master_port=port))
    here = info(master_port=port, local_world_size=local, master_addr=socket.gethostname())
    shared_store(here).set("key", "value")
    assert own_listeners() - before == {f"{address}:{port}"}
    assert shared_store(replace(here, rank=1)).get("key") == b"value"


def _listeners_of_a_world() -> set[str]:
    with join_world("gloo", 30) as world:
        world.barrier()
        return own_listeners()


def test_gloo_of_one_machine_listens_at_the_loopback_address() -> None:
    for found in in_world(2, _listeners_of_a_world):
        assert found
        assert all(map(is_loopback, found))
