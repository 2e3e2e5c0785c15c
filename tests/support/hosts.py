"""Network namespaces as hosts of their own, each with an address, an interface and a cable that can be pulled."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

MISSING = os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("taskset")
REASON = "network namespaces need root, ip and taskset: apt-get install iproute2 util-linux"


class Hosts:
    """`count` hosts 10.77.0.10, .11, ... on one bridge. Their names contain this process's id.

    As a context manager it removes them, with every process on them.
    """

    def __init__(self, count: int) -> None:
        self.hub = f"lockstep{os.getpid()}hub"
        self.names = [f"lockstep{os.getpid()}n{host}" for host in range(count)]

    def __enter__(self) -> "Hosts":
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "bridge", "up")
        for host in range(len(self.names)):
            self._add_host(host)
        return self

    def _add_host(self, host: int) -> None:
        name = self.names[host]
        _ip("netns", "add", name)
        _ip("-n", self.hub, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", self.hub, "link", "set", f"port{host}", "master", "bridge", "up")
        _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")

    def __exit__(self, *error: object) -> None:
        for host, name in enumerate([*self.names, self.hub]):
            for pid in self._pids(name):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            if host < len(self.names):
                shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def address(self, host: int) -> str:
        return f"10.77.0.{10 + host}"

    def on(self, host: int, *command: str) -> list[str]:
        """`command` as typed on `host`. A host has one core of its own: ranks use as many threads as it has cores."""
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[host % len(cores)])
        return ["taskset", "--cpu-list", core, "ip", "netns", "exec", self.names[host], *command]

    def set_names(self, host: int, names: dict[str, int]) -> None:
        """Let `host` know {name: host number}. `ip netns exec` shows this file there as /etc/hosts."""
        file = Path("/etc/netns", self.names[host], "hosts")
        file.parent.mkdir(parents=True)
        lines = [f"{self.address(number)} {name}" for name, number in names.items()]
        file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def processes(self, host: int) -> list[int]:
        return self._pids(self.names[host])

    def cut(self, host: int) -> None:
        """Pull the cable at the bridge's side: nothing on the host notices."""
        _ip("-n", self.hub, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        _ip("-n", self.hub, "link", "set", f"port{host}", "up")

    def _pids(self, name: str) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
