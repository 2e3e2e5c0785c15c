"""Several machines: network namespaces as hosts, whose cables are pulled. And what a launch listens at."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from support.commands import LAUNCHERS, PYTHON_TRAIN, ROOT, TORCHRUN, TRAIN, children, skip_without_mpirun, wait_for
from support.run_folders import has_logged
from support.sockets import is_loopback, listening_addresses

MISSING = os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("taskset")
pytestmark = pytest.mark.drill
PORT = 29400


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """Two hosts 10.77.0.10 and 10.77.0.11 on one bridge, each with an interface and a cable that can be pulled. Their
    names contain this process's id. As a context manager it removes them, with every process on them."""

    addresses = ("10.77.0.10", "10.77.0.11")

    def __init__(self):
        self.hub, *self.names = [f"lockstep{os.getpid()}{name}" for name in ("hub", "n0", "n1")]

    def __enter__(self):
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.hub, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", self.hub, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.hub, "link", "set", f"port{host}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *error):
        for name in (*self.names, self.hub):
            for pid in self._pids(name):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def on(self, host, *command):
        """`command` as typed on `host`. A host has one core of its own: ranks use as many threads as it has cores."""
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[host % len(cores)])
        return ["taskset", "--cpu-list", core, "ip", "netns", "exec", self.names[host], *command]

    def set_names(self, host, names):
        """Let `host` know {name: host number}. `ip netns exec` shows this file there as /etc/hosts."""
        file = Path("/etc/netns", self.names[host], "hosts")
        file.parent.mkdir(parents=True)
        lines = [f"{self.addresses[number]} {name}" for name, number in names.items()]
        file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def processes(self, host):
        return self._pids(self.names[host])

    def plug(self, host, way):
        """way: "down" pulls the cable at the bridge's side, so that nothing on the host notices; "up" mends it."""
        ip("-n", self.hub, "link", "set", f"port{host}", way)

    def _pids(self, name):
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]


@pytest.fixture
def hosts():
    if MISSING:
        pytest.skip("network namespaces need root, ip and taskset: apt-get install iproute2 util-linux")
    with Hosts() as made:
        yield made


NET = ["backend=gloo", "backend.socket_ifname=eth0", "model=mlp", "trainer.precision=fp64", "hydra.run.dir=run"]


def c10d(host, ranks):
    where = ["--nnodes=2", f"--rdzv-endpoint=10.77.0.10:{PORT}", f"--local-addr=10.77.0.{10 + host}"]
    kind = ["--rdzv-backend=c10d", "--rdzv-id=lockstep", f"--rdzv-conf=is_host={int(host == 0)}"]
    return [*TORCHRUN, *where, *kind, f"--nproc_per_node={ranks}", TRAIN]


def spawn(host, ranks):
    where = ["launch.nnodes=2", f"launch.node_rank={host}", "launch.master_addr=10.77.0.10"]
    return [*PYTHON_TRAIN, "launch=spawn", *where, f"launch.master_port={PORT}", f"launch.nproc_per_node={ranks}"]


@pytest.mark.parametrize(("starter", "ranks"), [(c10d, [1, 2]), (spawn, [1, 1])])
def test_hosts_with_unequal_ranks_equal_one_process(start, hosts, tmp_path, starter, ranks):
    """And a short silence of the network costs nothing."""
    words = [*NET, "trainer.epochs=4", "backend.timeout=30"]
    nodes = [start(*hosts.on(host, *starter(host, mine)), *words) for host, mine in enumerate(ranks)]
    if starter is c10d:
        wait_for(lambda: has_logged(tmp_path / "run", "epoch 2/"), "training")
        hosts.plug(1, "down")
        time.sleep(5)
        hosts.plug(1, "up")
    epochs = [line for node in nodes for line in node.finish().epochs]
    folder = tmp_path / "run"
    assert len(list((folder / "logs").iterdir())) == sum(ranks)
    assert len(list(folder.glob("events*"))) == 1  # of rank 0 alone
    assert not list(tmp_path.glob("outputs/*"))
    assert start(*PYTHON_TRAIN, *NET[2:], "trainer.epochs=4", "hydra.run.dir=alone").finish().epochs == epochs


def test_a_pulled_cable_ends_every_node_with_a_reason(start, hosts, tmp_path):
    """Under torchrun the ranks end alike, and its agents wait until TCP gives up."""
    words = [*NET, "backend.timeout=8", "trainer.epochs=1000"]
    nodes = [start(*hosts.on(host, *spawn(host, 1)), *words) for host in (0, 1)]
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 2/"), "training")
    hosts.plug(1, "down")
    for host, node in enumerate(nodes):
        assert node.finish(None, limit=30).process.returncode != 0
        assert "Timed out waiting 8000ms" in node.output
        assert "another rank or its machine is lost or did not answer within backend.timeout" in node.output
        assert not hosts.processes(host)


def test_a_rank_that_is_stopped_on_one_host_is_named_on_both(start, hosts):
    words = [*NET, "model._target_=support.faults.SummingModel", "watch.timeout=4"]
    for node in [start(*hosts.on(host, *spawn(host, 2)), *words, FAULT="forward/stopped:1:12") for host in (0, 1)]:
        node.finish(4)
        assert "lockstep: rank 1 of 4 hangs" in node.output
        assert "verdict: a rank is stopped" in node.output


def test_the_commands_of_compose_train_on_two_hosts_from_the_images_files(start, hosts, tmp_path):
    for folder in ("conf", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    nodes = []
    for host, service in enumerate(services.values()):
        hosts.set_names(host, {"node0": 0, "node1": 1, socket.gethostname(): host})
        command = [*TORCHRUN, *shlex.split(service["command"])[1:]]
        nodes.append(start(*hosts.on(host, *command), "trainer.epochs=1"))
    for node in nodes:
        node.finish()
    assert "rank 0 of 3" in nodes[0].output
    assert (nodes[0].folder / "model.pt").exists()


LONG = ["backend=gloo", "model=mlp", "model.width=512", "trainer.epochs=1000", "hydra.run.dir=run"]
# What srun sets for the two tasks of a step on one node whose name has a LAN address.
SRUN = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2}
SRUN |= {"SLURM_NODEID": 0, "SLURM_STEP_NODELIST": socket.gethostname()}
TASKS = [SRUN | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in (0, 1)]


def python_processes(pid):
    with suppress(OSError):  # it has ended meanwhile
        is_python = "python" in os.readlink(f"/proc/{pid}/exe").rpartition("/")[2]
        return [pid] * is_python + [one for child in children(pid) for one in python_processes(child)]
    return []


@pytest.mark.parametrize(("starter", "at_least"), [("launch=fork", 2), ("mpirun", 3), ("srun", 3)])  # 3: with a store
def test_ranks_on_one_machine_listen_at_loopback_only(start, tmp_path, starter, at_least):
    skip_without_mpirun(starter)
    command = [*LAUNCHERS.get(starter, PYTHON_TRAIN), *LONG]
    runs = [start(*command, **task) for task in (TASKS if starter == "srun" else [{}])]
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 1/"), "training", 120)
    found = listening_addresses([pid for run in runs for pid in python_processes(run.process.pid)])
    assert len(found) >= at_least, found
    assert all(map(is_loopback, found)), found
