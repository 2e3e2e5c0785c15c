"""The progress page: memory in which a rank notes what it does. Its monitor reads it without asking the rank."""

import mmap
import os
import struct
import tempfile
import time

SIZE = 4096
NUMBER, SECONDS = struct.Struct("=q"), struct.Struct("=d")
PHASES = (
    *("start", "meeting", "prepare", "build", "resume"),
    *("train", "evaluation", "snapshot", "disk", "export", "end", "mode"),
)
COLLECTIVES = ("", "shared_memory_sum")  # those that torch's flight recorder does not see
NOBODY = -1

# Offsets in the page, in bytes. All times are those of time.monotonic(), one clock for all processes of a machine.
EPOCH, STEP, STEPS_ENDED, STEP_ENDED_AT = 0, 8, 16, 24
PHASE, PHASE_SINCE = 32, 40
COLLECTIVE, VALUES, WAITS_FOR = 48, 56, 64
HEARTBEAT_AT = 72


def create_page_file() -> int:
    """A file of `SIZE` zero bytes that has no name, so it leaves nothing behind. Returns its descriptor."""
    file = create_unnamed_file("lockstep-page")
    os.ftruncate(file, SIZE)
    return file


def create_unnamed_file(name: str) -> int:
    """An empty file without a place in any folder. Returns its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class ProgressPage:
    """The page in the file `descriptor`, as both sides see it. Each field is written whole, so no lock is needed."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, SIZE)

    def get(self, field: int) -> int:
        value: int = NUMBER.unpack_from(self.memory, field)[0]
        return value

    def get_time(self, field: int) -> float:
        value: float = SECONDS.unpack_from(self.memory, field)[0]
        return value

    def set(self, field: int, value: int) -> None:
        NUMBER.pack_into(self.memory, field, value)

    def set_time(self, field: int, value: float) -> None:
        SECONDS.pack_into(self.memory, field, value)

    @property
    def phase(self) -> str:
        """What the rank does, one of PHASES."""
        return PHASES[self.get(PHASE)]

    def enter(self, phase: str) -> None:
        """The rank does something else from now on. phase: one of PHASES."""
        self.set_time(PHASE_SINCE, time.monotonic())
        self.set(PHASE, PHASES.index(phase))

    def step_ended(self, epoch: int, step: int) -> None:
        """epoch: counted from 1. step: optimizer steps done."""
        self.set(EPOCH, epoch)
        self.set(STEP, step)
        self.set_time(STEP_ENDED_AT, time.monotonic())
        self.set(STEPS_ENDED, self.get(STEPS_ENDED) + 1)

    def heartbeat(self) -> None:
        """A piece of the phase's work is done, such as a batch of an evaluation."""
        self.set_time(HEARTBEAT_AT, time.monotonic())

    @property
    def last_step_end(self) -> float:
        return self.get_time(STEP_ENDED_AT)

    @property
    def last_progress(self) -> float:
        """When the rank last ended a step or another piece of work, or entered a phase."""
        return max(self.get_time(field) for field in (STEP_ENDED_AT, PHASE_SINCE, HEARTBEAT_AT))

    def collective_starts(self, name: str, values: int) -> None:
        """name: one of COLLECTIVES. values: how many numbers the collective is about."""
        self.set(VALUES, values)
        self.set(WAITS_FOR, NOBODY)
        self.set(COLLECTIVE, COLLECTIVES.index(name))

    def waits_for(self, rank: int) -> None:
        """The rank that the collective waits for."""
        self.set(WAITS_FOR, rank)

    def collective_ends(self) -> None:
        self.set(COLLECTIVE, 0)
