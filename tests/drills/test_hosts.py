"""Several machines: network namespaces as hosts, whose cables are pulled."""

import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import yaml

from support import hosts as namespaces
from support.commands import PYTHON_TRAIN, ROOT, TORCHRUN, TRAIN, Command, wait_for
from support.hosts import Hosts
from support.run_folders import has_logged

NET = ["backend=gloo", "backend.socket_ifname=eth0", "model=mlp", "trainer.precision=fp64", "hydra.run.dir=run"]
PORT = 29400
Starter = Callable[[int, int, int], list[str]]  # (nodes, host, ranks) -> the command on this host

pytestmark = [pytest.mark.drill, pytest.mark.skipif(namespaces.MISSING, reason=namespaces.REASON)]


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def static(nodes: int, host: int, ranks: int) -> list[str]:
    where = [f"--nnodes={nodes}", f"--node_rank={host}", "--master_addr=10.77.0.10", f"--master_port={PORT}"]
    return [*TORCHRUN, *where, f"--nproc_per_node={ranks}", TRAIN]


def c10d(nodes: int, host: int, ranks: int) -> list[str]:
    where = [f"--nnodes={nodes}", f"--rdzv-endpoint=10.77.0.10:{PORT}", f"--local-addr=10.77.0.{10 + host}"]
    kind = ["--rdzv-backend=c10d", "--rdzv-id=lockstep", f"--rdzv-conf=is_host={int(host == 0)}"]
    return [*TORCHRUN, *where, *kind, f"--nproc_per_node={ranks}", TRAIN]


def spawn(nodes: int, host: int, ranks: int) -> list[str]:
    where = [f"launch.nnodes={nodes}", f"launch.node_rank={host}", "launch.master_addr=10.77.0.10"]
    return [*PYTHON_TRAIN, "launch=spawn", *where, f"launch.master_port={PORT}", f"launch.nproc_per_node={ranks}"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The epochs of one process, which any number of nodes must print, too."""
    command = [*PYTHON_TRAIN, "model=mlp", "trainer.precision=fp64", "trainer.epochs=6"]
    return Command(command, tmp_path_factory.mktemp("alone")).finish().epochs


@pytest.mark.parametrize(
    ("starter", "ranks"), [(static, [2, 1]), (c10d, [1, 2]), (spawn, [1, 1])], ids=["static", "c10d", "spawn"]
)
def test_hosts_with_unequal_ranks_equal_one_process(start, alone, starter, ranks):
    with Hosts(len(ranks)) as hosts:
        nodes = []
        for host, mine in enumerate(ranks):
            command = hosts.on(host, *starter(len(ranks), host, mine))
            nodes.append(start(*command, *NET, "trainer.epochs=6"))
        for node in nodes:
            node.finish()
    assert [line for node in nodes for line in node.epochs] == alone
    folder = nodes[0].cwd / "run"
    assert len(list((folder / "logs").iterdir())) == sum(ranks)
    assert len(list(folder.glob("events*"))) == 1  # of rank 0 alone
    assert not list(nodes[0].cwd.glob("outputs/*"))


def start_on_both(
    start: Callable[..., Command], hosts: Hosts, starter: Starter, *overrides: str
) -> tuple[Command, Command]:
    """The commands on two hosts of one rank each, once they train their second epoch."""
    first, second = (start(*hosts.on(host, *starter(2, host, 1)), *NET, *overrides) for host in (0, 1))
    wait_for(lambda: has_logged(first.cwd / "run", "epoch 2/"), "training")
    return first, second


def test_a_pulled_cable_ends_every_node_with_a_reason(start, two_hosts):
    """Under torchrun the ranks end alike, and its agents wait until TCP gives up."""
    nodes = start_on_both(start, two_hosts, spawn, "backend.timeout=8", "trainer.epochs=1000")
    two_hosts.cut(1)
    wait_for(lambda: all(node.process.poll() is not None for node in nodes), "end of both nodes", 30)
    for host, node in enumerate(nodes):
        assert node.finish(None).process.returncode != 0
        assert "Timed out waiting 8000ms" in node.output
        assert "another rank or its machine is lost or did not answer within backend.timeout" in node.output
        assert not two_hosts.processes(host)


def test_a_rank_that_is_stopped_on_one_host_is_named_on_both(start, two_hosts):
    """Beside a rank that can look at it."""
    words = [*NET, "model._target_=support.hangs.HangingModel", "watch.timeout=6"]
    commands = [two_hosts.on(host, *spawn(2, host, 2)) for host in (0, 1)]
    nodes = [start(*command, *words, HANG="stopped", PYTHONPATH=ROOT / "tests") for command in commands]
    for node in nodes:
        node.finish(4)
        assert "lockstep: rank 1 of 4 hangs" in node.output
        assert "verdict: a rank is stopped" in node.output


def test_a_short_silence_of_the_network_costs_nothing(start, two_hosts, alone):
    nodes = start_on_both(start, two_hosts, static, "backend.timeout=30", "trainer.epochs=6")
    two_hosts.cut(1)
    time.sleep(5)
    two_hosts.mend(1)
    for node in nodes:
        node.finish()
    assert nodes[0].epochs == alone


def test_the_commands_of_compose_train_on_two_hosts_from_the_images_files(start, two_hosts, tmp_path):
    for folder in ("conf", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    nodes = []
    for host, service in enumerate(services.values()):
        two_hosts.set_names(host, {"node0": 0, "node1": 1, socket.gethostname(): host})
        command = [*TORCHRUN, *shlex.split(service["command"])[1:]]
        nodes.append(start(*two_hosts.on(host, *command), "trainer.epochs=1"))
    for node in nodes:
        node.finish()
    assert "of 3 ranks" in nodes[0].output or "rank 0 of 3" in nodes[0].output
    assert (nodes[0].folder / "model.pt").exists()
