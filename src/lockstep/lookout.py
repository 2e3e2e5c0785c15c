"""A torchrun agent whose link to the meeting's host is cut waits for it until TCP gives up, 15 minutes and more: end it sooner.

A rank that fails on one of several nodes leaves this file running as a process of its own, since only a process that
outlives the rank can watch the agent, and nobody but the agent's own user may end it without being root.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE, WATCH = 5, 60  # seconds: for the agent to end by itself; to watch one that goes on with fresh ranks
RESENT = 6  # times that the kernel has sent the same bytes in vain, each time waiting twice as long: 12 s and more


def watch_over_agent(env):
    """Leave a lookout behind for this node's torchrun agent, our parent, where the world has several nodes."""
    if "TORCHELASTIC_RUN_ID" in env and env["LOCAL_RANK"] == "0" and env["LOCAL_WORLD_SIZE"] != env["WORLD_SIZE"]:
        subprocess.Popen([sys.executable, __file__, str(os.getppid())], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def unanswered(pid):
    """Whether a TCP connection of process `pid` sends again and again to a host that does not answer (as /proc/net/tcp tells)."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(descriptor))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            timer, resent, inode = (line.split()[column] for column in (5, 6, 9))
            if timer.startswith("01:") and int(resent, 16) >= RESENT and f"socket:[{inode}]" in own:
                return True
    return False


def watch(agent):
    time.sleep(GRACE)
    end = time.monotonic() + WATCH
    with suppress(OSError):  # /proc/<agent> is gone: the agent has ended
        while time.monotonic() < end:
            if unanswered(agent):
                print("lockstep: torchrun waits for a node that no longer answers; ended it here", file=sys.stderr)
                os.kill(agent, signal.SIGKILL)
                return
            time.sleep(0.5)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
