"""What a rank notes while it runs, for who looks at it from outside, and what an exception is.

The ranks of one machine share a folder. Their launcher makes it, or the first of them where another program has
started them. Of rank 1 it holds `rank1.at` (memory: where it is), `rank1.json` (its record: the process, the run, and
how it has failed) and `rank1.stacks` (what faulthandler writes).
"""

import faulthandler
import json
import linecache
import mmap
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lockstep.compat import BACKWARD, CALLED_OPERATOR, GENERATED
from lockstep.errors import EXIT_FAILED, ConfigError, StoppedEarly, kind_of, printable
from lockstep.failures.explain import explain_exception
from lockstep.files import PROJECT, is_library, is_project, is_users, write_whole

PHASES: tuple[str, ...] = ("start", "meeting", "prepare", "build", "resume", "train", "evaluation", "snapshot")
PHASES += ("disk", "export", "mode", "end")
STACK_SIGNAL = signal.SIGUSR2
LONGEST_MESSAGE, LOG_LINES, MOST_SAMPLES = 4000, 20, 1000  # characters; the last ones; of a batch


Record = dict[str, Any]
"""What is known of a rank, as JSON values: the process, its run, and how it has failed."""


class Place(NamedTuple):
    """Where a rank is. beats: pieces of work done, such as steps."""

    phase: int = 0
    beats: int = 0
    epoch: int = 0
    step: int = 0

    @property
    def name(self) -> str:
        return PHASES[self.phase]


class Frame(NamedTuple):
    """A line of code that runs."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.code}" if self.code else "")


def last_lines(path: str | None) -> list[str]:
    """The last lines of a log file, none if it cannot be read."""
    with suppress(OSError), open(path or "", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**15))
        return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return []


def read(path: Path) -> str:
    """The text of a file; "" if it is gone."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def oom_kills(file: str) -> int:
    """How often the kernel has killed for want of memory in a control group. file: of its counters."""
    return sum(map(int, re.findall(r"^oom_kill (\d+)", read(Path(file)), re.M)))


class Heartbeat:
    """Where this process is, and how it fails. A process has one, `heartbeat`."""

    stacks: Any = None  # the file in which faulthandler writes

    def __init__(self) -> None:
        self.begin()

    def begin(self, rank: int = 0, world_size: int = 1, started_by: str = "python") -> None:
        """This process is a rank from here on, which has not failed, and shares nothing with others. started_by: see
        `RankInfo`."""
        if self.stacks is not None:
            faulthandler.disable()
            faulthandler.unregister(STACK_SIGNAL)
            self.stacks.close()
        self.memory: Any = memoryview(bytearray(8 * len(Place()))).cast("q")
        self.folder: Path | None = None
        self.launcher: int | None = None
        self.stacks = None
        self.samples: Callable[[], list[int]] = list
        groups = re.findall(r"^\d+:(memory|):(.*)$", read(Path("/proc/self/cgroup")), re.M)
        files = [f"/sys/fs/cgroup/{kind}{group}/memory.{'oom_control' if kind else 'events'}" for kind, group in groups]
        who: Record = {"rank": rank, "world_size": world_size, "started_by": started_by, "pid": os.getpid()}
        who |= {"host": socket.gethostname(), "oom": {file: oom_kills(file) for file in files}}
        self.record = who | dict.fromkeys(("run_dir", "log", "resumed", "before"))

    def share(self, folder: Path | None, launcher: int | None = None) -> None:
        """Let other processes of this machine see where this rank is, its stacks, and its failure. None: there is no
        other rank, and the stack of a crash goes to stderr. launcher: the process that has started this rank, if it is
        ours: it prints how this one has ended, and removes what its ranks share."""
        self.folder, self.launcher, name = folder, launcher, f"rank{self.record['rank']}"
        if folder is None:
            self.stacks = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (it stays open)
        else:
            write_whole(folder / f"{name}.at", bytes(self.memory), sync=False)
            with (folder / f"{name}.at").open("r+b") as file:
                self.memory = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
            self.stacks = (folder / f"{name}.stacks").open("a+b", buffering=0)
            self.note()
        with suppress(Exception):  # stderr is closed, or no file
            faulthandler.enable(self.stacks if folder else sys.stderr)
        # Loader workers that are forked from this rank inherit the file and the handler.
        faulthandler.register(STACK_SIGNAL, file=self.stacks, all_threads=True)

    def note(self, **facts: Any) -> None:
        """Add to the record: such as run_dir, log, the snapshot and the step that this rank has `resumed` from."""
        self.record |= facts
        if self.folder is not None:
            with suppress(OSError):
                write_whole(self.folder / f"rank{self.record['rank']}.json", json.dumps(self.record), sync=False)

    @property
    def place(self) -> Place:
        return Place(*self.memory)

    def enter(self, phase: str, samples: Callable[[], list[int]] = list, epoch: int | None = None) -> None:
        """The rank does something else from now on. samples: gives the numbers of those that it trains on. epoch:
        counted from 1."""
        self.samples = samples
        self.memory[0] = PHASES.index(phase)
        self.step_ended(self.place.epoch if epoch is None else epoch, self.place.step)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside the block the rank is in this phase, and after an exception: the report says where the rank failed."""
        before, samples = self.place.name, self.samples
        self.enter(phase, samples)
        yield
        self.enter(before, samples)

    def beat(self) -> None:
        """A piece of the phase's work is done, such as a batch of an evaluation: the rank does not hang."""
        self.memory[1] += 1

    def step_ended(self, epoch: int, step: int) -> None:
        """epoch: counted from 1. step: optimizer steps done."""
        self.memory[1] += 1
        self.memory[2] = epoch
        self.memory[3] = step

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an exception that leaves the block, before other blocks are left and take their time."""
        try:
            yield
        except BaseException as error:
            if os.getpid() != self.record["pid"]:  # the user's code has forked it: the rank's files stay open
                if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                    os._exit(error.code or 0)
                traceback.print_exception(error)
                os._exit(EXIT_FAILED)
            if isinstance(error, Exception):
                self.fails(error)
            raise

    def fails(self, error: BaseException) -> None:
        """Record that this rank fails. The first call counts."""
        if "kind" in self.record or isinstance(error, StoppedEarly):
            return
        place, found = self.place, exception_record(error) | {"samples": []}
        found["is_echo"] &= self.record["world_size"] > 1
        with suppress(Exception):  # they are a part of what failed
            found["samples"] = self.samples()[:MOST_SAMPLES]
        found["meaning"], found["advice"] = explain_exception(found)
        found |= {"phase": place.name, "epoch": place.epoch, "step": place.step, "time": time.time()}
        self.note(log_lines=last_lines(self.record["log"]), **found)


heartbeat = Heartbeat()


def read_place(folder: Path, rank: int) -> Place:
    """Where a rank of this machine is, if it is known. A rank that ends as it should is in the phase "end"."""
    with suppress(OSError):
        return Place(*memoryview((folder / f"rank{rank}.at").read_bytes()).cast("q"))
    return Place()


PASSES_ON = "__torch_function__"  # of a mode, which sees each operation of a forward pass
COMPUTING = tuple(f"{PROJECT}/{package}/" for package in ("models", "tasks", "data"))  # no rank waits for others there
WAITS = ("/torch/distributed/", "/torch/nn/parallel/", GENERATED)  # compiled code may hold collectives
LONGEST_CHAIN = 20  # of exceptions: `raise error from error` has no end
OF_WORKER = "Original Traceback"  # torch's words before the traceback, as text, of an exception in a DataLoader worker


def exception_record(error: BaseException) -> Record:
    """What the failure report needs to know of `error`, as JSON values: its kind, type and message, whether it is the
    echo of a lost rank, the line of the user's code, the operation that failed and the shapes in it."""
    raised_in = "".join(frame.file for frame, _ in _trace(error)[-1:])
    is_wrapper = type(error).__name__ == "InstantiationException" or "/torch/distributed/pipelining/" in raised_in
    if is_wrapper and error.__cause__ not in (None, error):  # it is Hydra's, or torch's, of what the user's code raised
        return exception_record(error.__cause__)
    known: Record = {"kind": kind_of(error), "type": type(error).__name__, "message": message_of(error)}
    known["is_echo"] = is_echo(error)
    # The innermost line of the user's code; of this project's if there is none; else the innermost of all. With the
    # tensors and modules that it names.
    traces = [_trace(one) for one in (error, error.__cause__) if one is not None]
    trace = next((found for found in traces if any(is_users(at.file) for at, _ in found)), traces[0])
    if not trace:
        return known
    at, frame = max(reversed(trace), key=lambda entry: (is_users(entry[0].file), is_project(entry[0].file)))
    operands = {}
    for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", at.code)):
        value: Any = frame.f_locals.get(name) if frame else None
        with suppress(Exception):  # the report must not fail on a property of the user's
            if hasattr(value, "shape") and hasattr(value, "dtype"):
                operands[name] = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            elif hasattr(value, "extra_repr") and not isinstance(value, type):
                operands[name] = f"{type(value).__name__}({value.extra_repr()})"
    return known | at._asdict() | {"code": at.code, "operands": operands}


def is_echo(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, can come from the loss of another rank. It may also be a mistake of
    this rank alone, so the time decides among such. Not by its words, but by two rules: torch's own type for it; or a
    broken connection, a timeout or a plain RuntimeError, which C++ raises, where ranks wait for each other: torch's,
    this project's, or the user's own wait."""
    for _ in range(LONGEST_CHAIN):
        if error is None or isinstance(error, ConfigError):  # that says what to type
            return False
        if isinstance(error, getattr(sys.modules.get("torch.distributed"), "DistError", ())):
            return True
        # Of code such as Python's socket.py it matters who has called it.
        frames = [frame for frame, _ in _trace(error) if "/torch/" in frame.file or not is_library(frame.file)]
        last = [Frame("", 0, ""), *(frame for frame in frames if not frame.file.endswith(CALLED_OPERATOR))][-1]
        waits = last.code.endswith(".wait()") or last.function == BACKWARD or any(part in last.file for part in WAITS)
        waits |= is_project(last.file) and not last.file.startswith(COMPUTING)
        if waits and (type(error) is RuntimeError or isinstance(error, ConnectionError | TimeoutError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def message_of(error: BaseException) -> str:
    """At most LONGEST_MESSAGE characters that a terminal and a file can show."""
    text = _text(error)
    if OF_WORKER in text:  # what comes after its last frame, without the type, which is known
        text = re.split(r'\n  File ".*\n(?: {4}.*\n)*', text)[-1]
        text = re.sub(rf"^(\w+\.)*{type(error).__name__}: ", "", text)
    return printable(text[:LONGEST_MESSAGE], kept="\n\t")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's may fail to describe itself
        return "(no message)"


def _trace(error: BaseException) -> list[tuple[Frame, FrameType | None]]:
    """The lines from the outermost to the one that raised, but for those that pass on what another line has called."""
    if OF_WORKER in (text := _text(error)):
        found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
        return [(Frame(file, int(line), function), None) for file, line, function in found]
    walked = traceback.walk_tb(error.__traceback__)
    lines = [(Frame(frame.f_code.co_filename, line, frame.f_code.co_name), frame) for frame, line in walked]
    return [(at, frame) for at, frame in lines if at.function != PASSES_ON or not is_project(at.file)]
