"""Several machines: network namespaces as hosts, each with an address, an interface and a cable that can be pulled."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from conftest import ROOT, TORCHRUN, TRAIN, Command, wait_for

NET = ["backend=gloo", "backend.socket_ifname=eth0", "model=mlp", "trainer.precision=fp64", "hydra.run.dir=run"]
PORT = 29400

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces want root and ip: apt-get install iproute2"),
]


class Hosts:
    """`count` hosts 10.77.0.10, .11, ... on one bridge; their names are this process's own."""

    def __init__(self, count):
        self.hub = f"lockstep{os.getpid()}hub"
        self.names = [f"lockstep{os.getpid()}n{host}" for host in range(count)]

    def up(self):
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.hub, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", self.hub, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.hub, "link", "set", f"port{host}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")

    def down(self):
        for name in [*self.names, self.hub]:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def address(self, host):
        return f"10.77.0.{10 + host}"

    def on(self, host, *command):
        """`command` as typed on `host`. A host has one core of its own: ranks take all the threads they can see."""
        cores = sorted(os.sched_getaffinity(0))
        return ["taskset", "--cpu-list", cores[host % len(cores)], "ip", "netns", "exec", self.names[host], *command]

    def name(self, host, names):
        """Let `host` know others by {name: host number}: `ip netns exec` shows this file there as /etc/hosts."""
        file = Path("/etc/netns", self.names[host], "hosts")
        file.parent.mkdir(parents=True)
        file.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(number)} {name}\n" for name, number in names.items()))

    def cut(self, host):
        """Pull the cable at the bridge's side: nothing on the host notices."""
        ip("-n", self.hub, "link", "set", f"port{host}", "down")

    def mend(self, host):
        ip("-n", self.hub, "link", "set", f"port{host}", "up")


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def hosts():
    """hosts(count) -> Hosts that are up, until the test ends."""
    made = []

    def hosts(count):
        made.append(Hosts(count))
        made[-1].up()
        return made[-1]

    yield hosts
    for each in made:
        each.down()


def static(nodes, host, ranks):
    return [*TORCHRUN, f"--nnodes={nodes}", f"--node_rank={host}", f"--nproc_per_node={ranks}", "--master_addr=10.77.0.10",
            f"--master_port={PORT}", TRAIN]  # fmt: skip


def c10d(nodes, host, ranks):
    return [*TORCHRUN, f"--nnodes={nodes}", f"--nproc_per_node={ranks}", "--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.10:{PORT}",
            "--rdzv-id=lockstep", f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr=10.77.0.{10 + host}", TRAIN]  # fmt: skip


def spawn(nodes, host, ranks):
    return [sys.executable, TRAIN, "launch=spawn", f"launch.nnodes={nodes}", f"launch.node_rank={host}", f"launch.nproc_per_node={ranks}",
            "launch.master_addr=10.77.0.10", f"launch.master_port={PORT}"]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The epochs of one process, which any number of nodes must print too."""
    return (
        Command([sys.executable, TRAIN, "model=mlp", "trainer.precision=fp64", "trainer.epochs=6"], tmp_path_factory.mktemp("alone")).finish().epochs
    )


@pytest.mark.parametrize(("starter", "ranks"), [(static, [2, 1, 1]), (c10d, [1, 2]), (spawn, [1, 1])], ids=["static", "c10d", "spawn"])
def test_hosts_with_their_own_ranks_equal_one_process(start, hosts, alone, starter, ranks):
    there = hosts(len(ranks))
    nodes = [start(*there.on(host, *starter(len(ranks), host, mine)), *NET, "trainer.epochs=6") for host, mine in enumerate(ranks)]
    for node in nodes:
        node.finish()
    assert [line for node in nodes for line in node.epochs] == alone
    folder = nodes[0].cwd / "run"
    assert len(list((folder / "logs").iterdir())) == sum(ranks)
    assert len(list(folder.glob("events*"))) == 1
    assert not list(nodes[0].cwd.glob("outputs/*"))


def under_way(start, there, starter, *overrides):
    """The commands on two hosts of one rank each, once they train their second epoch."""
    nodes = [start(*there.on(host, *starter(2, host, 1)), *NET, *overrides) for host in (0, 1)]
    log = nodes[0].cwd / "run" / "train.log"
    wait_for(lambda: log.exists() and "epoch 2/" in log.read_text(), "training")
    return nodes


@pytest.mark.parametrize("starter", [static, c10d, spawn])
def test_a_pulled_cable_ends_every_node_with_a_reason(start, hosts, starter):
    there = hosts(2)
    nodes = under_way(start, there, starter, "backend.timeout=8", "trainer.epochs=1000")
    there.cut(1)
    wait_for(lambda: all(node.process.poll() is not None for node in nodes), "end of both nodes", 30)
    for host, node in enumerate(nodes):
        assert node.finish(None).process.returncode != 0
        assert "Timed out waiting 8000ms" in node.output
        assert "lockstep: a rank did not answer within backend.timeout" in node.output
        assert not subprocess.run(["ip", "netns", "pids", there.names[host]], capture_output=True).stdout


def test_a_short_silence_of_the_network_costs_nothing(start, hosts, alone):
    there = hosts(2)
    nodes = under_way(start, there, static, "backend.timeout=30", "trainer.epochs=6")
    there.cut(1)
    time.sleep(3)
    there.mend(1)
    for node in nodes:
        node.finish()
    assert nodes[0].epochs == alone


def test_the_commands_of_compose_train_on_two_hosts_from_the_images_files(start, hosts, tmp_path):
    there = hosts(2)
    for folder in ("conf", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for host in range(2):
        there.name(host, {f"node{other}": other for other in range(2)} | {socket.gethostname(): host})
    nodes = [
        start(*there.on(host, *TORCHRUN, *shlex.split(service["command"])[1:]), "trainer.epochs=1") for host, service in enumerate(services.values())
    ]
    for node in nodes:
        node.finish()
    assert "of 3 ranks" in nodes[0].output
    assert (nodes[0].folder / "model.pt").exists()
