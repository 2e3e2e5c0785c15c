"""Ends a torchrun agent that waits for a machine which no longer answers. TCP alone would give up after 15 minutes.

A rank that fails in a world of several machines starts this file as a process of its own: only a process that outlives
the rank can watch the agent, and only the agent's own user, or root, may end it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 5  # for the agent to end by itself
WATCH_SECONDS = 60  # then it has gone on with fresh ranks
LOST_RESENDS = 6  # of the same bytes, each after twice the time of the one before: 12 s and more


def start_agent_watchdog(env: Mapping[str, str]) -> None:
    """Start a watchdog for the torchrun agent that is the parent of this process, if the world has several machines."""
    in_torchrun = {"TORCHELASTIC_RUN_ID", "RANK", "LOCAL_WORLD_SIZE"} <= env.keys()  # one alone is left by a script
    if in_torchrun and env.get("LOCAL_RANK") == "0" and env["LOCAL_WORLD_SIZE"] != env.get("WORLD_SIZE"):
        command = [sys.executable, __file__, str(os.getppid())]
        subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def has_lost_connection(pid: int) -> bool:
    """Whether a TCP connection of process `pid` resends to a host that does not answer, by Linux' /proc/net/tcp."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(descriptor))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            timer, resends, inode = columns[5], int(columns[6], 16), columns[9]
            if timer.startswith("01:") and resends >= LOST_RESENDS and f"socket:[{inode}]" in sockets:
                return True
    return False


def watch(agent: int) -> None:
    """Watch the process `agent` for a while, and kill it if its connection is lost."""
    time.sleep(GRACE_SECONDS)
    end = time.monotonic() + WATCH_SECONDS
    with suppress(OSError):  # no /proc/<agent>: the agent has ended, or this is not Linux
        while time.monotonic() < end:
            if has_lost_connection(agent):
                print("lockstep: torchrun waits for a node that no longer answers; ended it here", file=sys.stderr)
                os.kill(agent, signal.SIGKILL)
                return
            time.sleep(0.5)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
