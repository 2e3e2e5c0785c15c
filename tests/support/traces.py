"""What a command leaves that a fault met: processes, and files in TMPDIR and /dev/shm."""

import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from support.commands import processes_of

MARK = "LOCKSTEP_DRILL"  # every process of a command inherits it
SHARED_MEMORY = Path("/dev/shm")
OF_TORCH = ("torchelastic_", "torchinductor_")  # torchrun's log folder and a compiler's cache, which torch leaves
OF_WORLDS = "world"  # begins the names of semaphores of tests that run beside
PROCESSES_END, FILES_GO = 10.0, 30.0  # seconds; what a command has left stays for ever, another test's file for a while

# Where something is broken on purpose: all tests of these files. `make faults` runs them.
FILES = """
test_disks test_faults test_hangs test_hosts test_interrupted_runs test_kills test_promise
test_signals test_slurm_jobs test_waits
"""


class Traces:
    """Of one command, which gets `environment`."""

    def __init__(self):
        self.temporary = Path(tempfile.mkdtemp(prefix="drill-"))  # short: the path of a socket has at most 107 bytes
        self.environment = {"TMPDIR": str(self.temporary), MARK: self.temporary.name}
        self.shared_before = _shared()

    def left(self, command):
        """The words of its processes that do not end soon, names in TMPDIR, and new ones in /dev/shm that stay there
        and are no living process's. To be called after the command's end; removes TMPDIR."""
        alive, own, shared = [], [], set()
        if command.process.poll() is not None:
            deadline = time.monotonic() + PROCESSES_END
            while (alive := self._alive(command.process.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            deadline, shared = time.monotonic() + FILES_GO, _shared() - self.shared_before
            while shared and time.monotonic() < deadline:
                time.sleep(0.1)
                shared = shared & _shared() - _mapped()
            own = [name for name in os.listdir(self.temporary) if not name.startswith(OF_TORCH)]
        shutil.rmtree(self.temporary, ignore_errors=True)
        return [*alive, *own, *shared]

    def _alive(self, session):
        found, entry, together = [], f"\0{MARK}={self.temporary.name}\0".encode(), processes_of(session)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is somebody else's
                if int(process.name) in together or entry in b"\0" + (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found


def _shared():
    return {name for name in os.listdir(SHARED_MEMORY) if not name.startswith(f"sem.{OF_WORLDS}")}


def _mapped():
    """The names in /dev/shm of which a process has a mapping."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.update(re.findall(rf" {SHARED_MEMORY}/(\S+)", (process / "maps").read_text(errors="replace")))
    return found
