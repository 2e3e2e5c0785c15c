"""Every launcher on one machine: what its processes listen at, and what another machine reaches of it."""

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from support import hosts as namespaces
from support.commands import LAUNCHERS, PYTHON_TRAIN, Command, skip_without_mpirun, wait_for
from support.hosts import Hosts
from support.run_folders import has_logged
from support.sockets import descendants, is_loopback, listening_addresses

pytestmark = pytest.mark.drill

LONG = ["backend=gloo", "model=mlp", "model.width=512", "trainer.epochs=1000", "hydra.run.dir=run"]
# What srun sets for the two tasks of a step on one node whose name has a LAN address.
SRUN = {
    "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2, "SLURM_NODEID": 0,
    "SLURM_STEP_NODELIST": socket.gethostname(),
}  # fmt: skip


def all_listeners(commands: list[Command]) -> dict[str, int]:
    """What the Python processes of these commands listen at. mpirun's own process is not one of ours."""
    pids = [pid for command in commands for pid in descendants(command.process.pid)]
    return listening_addresses([pid for pid in pids if _is_python(pid)])


def _is_python(pid: int) -> bool:
    with suppress(FileNotFoundError):  # it has ended meanwhile
        return "python" in os.readlink(f"/proc/{pid}/exe").rpartition("/")[2]
    return False


def assert_only_loopback(commands: list[Command], at_least: int) -> None:
    folder = commands[0].cwd / "run"
    wait_for(lambda: has_logged(folder, "epoch 1/"), "training", 120)
    found = all_listeners(commands)
    assert len(found) >= at_least, found
    assert all(map(is_loopback, found)), found


PORTS = {"python": 1, "launch=torchrun": 2, "launch=spawn": 2, "launch=fork": 2, "mpirun": 3}  # 3: no file is the store


@pytest.mark.parametrize("starter", PORTS)
def test_ranks_on_one_machine_listen_at_loopback_only(start: Callable[..., Command], starter: str) -> None:
    skip_without_mpirun(starter)
    assert_only_loopback([start(*LAUNCHERS[starter], *LONG)], PORTS[starter])


def test_tasks_of_srun_on_one_node_listen_at_loopback_only(start: Callable[..., Command]) -> None:
    ranks = [start(*PYTHON_TRAIN, *LONG, **SRUN, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in (0, 1)]
    assert_only_loopback(ranks, 3)


OPEN_PORT = "29999"
CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=3).close()
        print(port, "answers")
    except OSError as error:
        print(port, "does not answer:", error)
"""


@pytest.mark.skipif(namespaces.MISSING, reason=namespaces.REASON)
def test_another_machine_reaches_no_port_of_a_launch(start: Callable[..., Command]) -> None:
    with Hosts(2) as hosts:
        hosts.set_names(0, {socket.gethostname(): 0})  # the host's name has its LAN address, as on most clusters
        run = start(*hosts.on(0, *LAUNCHERS["launch=spawn"], *LONG))
        wait_for(lambda: has_logged(run.cwd / "run", "epoch 1/"), "training", 120)
        ports = sorted({place.rpartition(":")[2] for place in listening_addresses(hosts.processes(0))})
        assert ports
        start(*hosts.on(0, sys.executable, "-m", "http.server", OPEN_PORT))  # shows that the machines do see each other
        wait_for(
            lambda: any(place.endswith(f":{OPEN_PORT}") for place in listening_addresses(hosts.processes(0))), "it"
        )
        seen = start(*hosts.on(1, sys.executable, "-c", CONNECT, hosts.address(0), OPEN_PORT, *ports)).finish().output
    assert seen.splitlines()[0] == f"{OPEN_PORT} answers", seen
    assert all("does not answer" in line for line in seen.splitlines()[1:]), seen
