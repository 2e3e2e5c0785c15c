"""What a rank notes while it runs, for who looks at it from outside, and its failure as a record for the report.

The ranks of one machine share a folder. Their launcher makes it, or the first of them where another program has
started them. Of rank 1 it holds `rank1.who` (JSON: its process, its run), `rank1.at` (memory: where it is),
`rank1.stacks` (what faulthandler writes), `rank1.json` (the record of its failure) and `rank1.facts` (of a hang).
"""

import faulthandler
import json
import linecache
import mmap
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from lockstep.compat import BACKWARD, CALLED_OPERATOR, GENERATED
from lockstep.errors import EXIT_FAILED, ConfigError, StoppedEarly, kind_of, printable
from lockstep.failures.processes import oom_counter, oom_kills
from lockstep.files import write_whole
from lockstep.source_code import PROJECT, is_library, is_project, is_users

FOLDER = "LOCKSTEP_RANK_FOLDER"  # the environment variable with the folder that a launcher has made
PHASES: tuple[str, ...] = ("start", "meeting", "prepare", "build", "resume", "train", "evaluation", "snapshot")
PHASES += ("disk", "export", "mode", "end")
STACK_SIGNAL = getattr(signal, "SIGUSR2", None)
LONGEST_MESSAGE = 4000  # characters
LOG_LINES = 20
MOST_SAMPLES = 1000  # of a batch
_AT = struct.Struct("=5q")  # a Place, of which these are parts
_PHASE, _BEATS, _STEP = struct.Struct("=q"), struct.Struct("=q"), struct.Struct("=3q")


class Place(NamedTuple):
    """Where a rank is. beats: pieces of work done, such as steps. values: of a sum over ranks that has not ended, which
    torch's flight recorder does not see."""

    phase: int
    values: int
    beats: int
    epoch: int
    step: int

    @property
    def name(self) -> str:
        return PHASES[self.phase]


class Heartbeat:
    """Where this process is, and how it fails. A process has one, `heartbeat`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, rank: int = 0, world_size: int = 1) -> None:
        """This process is a rank from here on, and has not failed."""
        self.memory: Any = bytearray(_AT.size)
        self.folder: Path | None = None
        self.stacks: Any = None  # the file in which faulthandler writes
        self.samples: Callable[[], list[int]] | None = None
        self.beats, self.failure = 0, dict[str, Any]()
        ident = f"0x{threading.main_thread().ident:016x}"  # as faulthandler writes it
        self.who: dict[str, Any] = {"rank": rank, "world_size": world_size, "pid": os.getpid(), "main_thread": ident}
        self.who |= {"host": socket.gethostname(), "run_dir": None, "log": None, "resumed": None, "before": None}
        counter = oom_counter()
        self.who["oom"] = [counter, oom_kills(counter)]  # of its control group, which may be its own

    def share(self, folder: Path | None) -> None:
        """Let other processes of this machine see where this rank is, its stacks, and its failure. None: there is no
        other rank, and the stack of a crash goes to stderr."""
        if folder is None:
            self.stacks = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (it stays open)
            with suppress(Exception):  # stderr is closed, or no file
                faulthandler.enable()
        else:
            name = f"rank{self.who['rank']}"
            write_whole(folder / f"{name}.at", bytes(self.memory), sync=False)
            with (folder / f"{name}.at").open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), _AT.size)
            self.stacks = (folder / f"{name}.stacks").open("a+b", buffering=0)
            self.folder = folder
            self.note()
            faulthandler.enable(self.stacks)
        if STACK_SIGNAL is not None:  # loader workers that are forked from this rank inherit the file and the handler
            faulthandler.register(STACK_SIGNAL, file=self.stacks, all_threads=True)

    def leave(self) -> None:
        """Stop sharing: this process goes on as no rank."""
        if self.stacks is not None:
            faulthandler.disable()
            if STACK_SIGNAL is not None:
                faulthandler.unregister(STACK_SIGNAL)
            self.stacks.close()
        self.begin()

    def note(self, **facts: Any) -> None:
        """Facts of this rank: its run_dir, its log, the snapshot and the step that it `resumed` from."""
        self.who |= facts
        if self.folder is not None and not self.is_copy:
            with suppress(OSError):
                write_whole(self.folder / f"rank{self.who['rank']}.who", json.dumps(self.who), sync=False)

    @property
    def is_copy(self) -> bool:
        """Whether this process is no rank: the user's code has forked it from one."""
        return bool(os.getpid() != self.who["pid"])

    @property
    def place(self) -> Place:
        return Place(*_AT.unpack_from(self.memory))

    def enter(self, phase: str, samples: Callable[[], list[int]] | None = None, epoch: int | None = None) -> None:
        """The rank does something else from now on. samples: gives the numbers of those that it trains on. epoch:
        counted from 1."""
        self.samples = samples
        _PHASE.pack_into(self.memory, 0, PHASES.index(phase))
        place = self.place
        self.step_ended(place.epoch if epoch is None else epoch, place.step)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside the block the rank is in this phase, and after an exception: the report says where the rank failed."""
        before, samples = self.place.name, self.samples
        self.enter(phase, samples)
        yield
        self.enter(before, samples)

    def beat(self) -> None:
        """A piece of the phase's work is done, such as a batch of an evaluation: the rank does not hang."""
        self.beats += 1
        _BEATS.pack_into(self.memory, 16, self.beats)  # alone: a loader worker has a copy of this object

    def step_ended(self, epoch: int, step: int) -> None:
        """epoch: counted from 1. step: optimizer steps done."""
        self.beats += 1
        _STEP.pack_into(self.memory, 16, self.beats, epoch, step)

    def sums(self, values: int) -> None:
        """This rank begins a sum over ranks through shared memory, or has ended it: 0."""
        _PHASE.pack_into(self.memory, 8, values)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an exception that leaves the block, before other blocks are left and take their time."""
        try:
            yield
        except SystemExit as error:
            self._end_copy(error)
            raise
        except Exception as error:
            self.fails(error)
            raise

    def fails(self, error: BaseException) -> None:
        """Record that this rank fails. The first call counts."""
        self._end_copy(error)
        if self.failure or isinstance(error, StoppedEarly):
            return
        place = self.place
        samples: list[int] = []
        with suppress(Exception):  # they are a part of what failed
            samples = [] if self.samples is None else self.samples()[:MOST_SAMPLES]
        self.failure = self.who | {"time": time.time(), "samples": samples, "log_lines": last_lines(self.who["log"])}
        self.failure |= {"phase": place.name, "epoch": place.epoch, "step": place.step} | exception_record(error)
        self.failure["is_echo"] &= self.who["world_size"] > 1
        if self.folder is not None:
            with suppress(OSError):
                text = json.dumps(self.failure)
                write_whole(self.folder / f"rank{self.who['rank']}.json", text, sync=False)

    def _end_copy(self, error: BaseException) -> None:
        """End this process, which `error` ends, if the user's code has forked it from the rank.

        It would otherwise close the rank's files, and wait for threads that a fork does not have.
        """
        if self.is_copy:
            if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                os._exit(error.code or 0)
            traceback.print_exception(error)
            os._exit(EXIT_FAILED)


heartbeat = Heartbeat()


def read_place(folder: Path, rank: int) -> Place:
    """Where another rank of this machine is. Raises OSError."""
    return Place(*_AT.unpack((folder / f"rank{rank}.at").read_bytes()))


def phase_of(folder: Path, rank: int) -> str:
    """The phase in which another rank of this machine is; "" if it is not known. A rank says that it ends as it should
    by the phase "end"."""
    try:
        return read_place(folder, rank).name
    except OSError:
        return ""


def last_lines(path: str | None) -> list[str]:
    """The last lines of a log file, none if it cannot be read."""
    try:
        with open(path or "", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2**15))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


# An exception.

PASSES_ON = "__torch_function__"  # of a mode, which sees each operation of a forward pass
COMPUTING = tuple(f"{PROJECT}/{package}/" for package in ("models", "tasks", "data"))  # no rank waits for others there
WAITS = ("/torch/distributed/", "/torch/nn/parallel/", GENERATED)  # compiled code may hold collectives
LONGEST_CHAIN = 20  # of exceptions: `raise error from error` has no end
OF_WORKER = "Original Traceback"  # torch's words before the traceback, as text, of an exception in a DataLoader worker
_FRAME_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')


def exception_record(error: BaseException) -> dict[str, Any]:
    """What the failure report needs to know of `error`, as JSON values: its kind, type and message, whether it is the
    echo of a lost rank, the line of the user's code, the operation that failed and the shapes in it."""
    while _is_wrapper(error) and error.__cause__ not in (None, error):
        error = error.__cause__
    known = {"kind": kind_of(error), "type": type(error).__name__, "message": message_of(error)}
    return known | {"is_echo": is_echo(error), **_place(error)}


def _is_wrapper(error: BaseException) -> bool:
    """Whether Hydra, or torch's pipeline, has made `error` of what a class of the user's raised."""
    entries = _entries(error)
    is_of_pipeline = bool(entries) and "/torch/distributed/pipelining/" in _file(entries[-1])
    return type(error).__name__ == "InstantiationException" or is_of_pipeline


def is_echo(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, can come from the loss of another rank: by its type and the frame
    that raised it, not by its words. It may also be a mistake of this rank alone, so the time decides among such."""
    for _ in range(LONGEST_CHAIN):
        if error is None or isinstance(error, ConfigError):  # that says what to type
            return False
        if _is_from_communication(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_from_communication(error: BaseException) -> bool:
    """By two rules: torch's own type for it; or a broken connection, a timeout or a plain RuntimeError, which C++
    raises, where ranks wait for each other: torch's, and this project's."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, getattr(distributed, "DistError", ())):
        return True
    if type(error) is not RuntimeError and not isinstance(error, ConnectionError | TimeoutError):
        return False
    # Of code such as Python's socket.py it matters who has called it.
    entries = [entry for entry in _entries(error) if not _file(entry).endswith(CALLED_OPERATOR)]
    entries = [entry for entry in entries if "/torch/" in _file(entry) or not is_library(_file(entry))]
    if not entries:
        return False
    file = _file(entries[-1])
    if is_project(file):
        return not file.startswith(COMPUTING)
    is_own_wait = linecache.getline(file, entries[-1].tb_lineno).rstrip().endswith(".wait()")  # of the user's
    return is_own_wait or entries[-1].tb_frame.f_code.co_name == BACKWARD or any(part in file for part in WAITS)


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


def _entries(error: BaseException) -> list[TracebackType]:
    """The frames from the outermost to the one that raised, but for those that pass on what another line has called."""
    entries, trace = list[TracebackType](), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name != PASSES_ON or not is_project(_file(trace)):
            entries.append(trace)
        trace = trace.tb_next
    return entries


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _owner(file: str) -> int:
    """2 for the user's code, 1 for this project's, 0 for libraries."""
    return 2 if is_users(file) else int(is_project(file))


def _place(error: BaseException) -> dict[str, Any]:
    """The innermost line of the user's code; of this project's if there is none; else the innermost of all. With the
    tensors and modules that it names."""
    cause, text = error.__cause__, _text(error)
    if OF_WORKER in text and (frames := _FRAME_IN_TEXT.findall(text)):
        file, line, function, code = max(enumerate(frames), key=lambda item: (_owner(item[1][0]), item[0]))[1]
        return {"file": file, "line": int(line), "function": function, "code": code, "operands": {}}
    entries = _entries(error)
    is_users_cause = cause is not None and (isinstance(cause, SystemExit) or _runs_users_code(_entries(cause)))
    if cause is not None and is_users_cause and not _runs_users_code(entries):
        entries = _entries(cause)
    if not entries:
        return {}
    chosen = max(enumerate(entries), key=lambda item: (_owner(_file(item[1])), item[0]))[1]
    code = linecache.getline(_file(chosen), chosen.tb_lineno).strip()
    found = {"file": _file(chosen), "line": chosen.tb_lineno, "function": chosen.tb_frame.f_code.co_name, "code": code}
    return found | {"operands": _operands(code, chosen.tb_frame)}


def _runs_users_code(entries: list[TracebackType]) -> bool:
    return any(is_users(_file(entry)) for entry in entries)


def _operands(code: str, frame: FrameType) -> dict[str, str]:
    """{name: "(32, 64) float32" or "Linear(in_features=64, ...)"} of the tensors and modules in a line of code."""
    operands = {}
    for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", code)):
        value: Any = frame.f_locals.get(name)
        with suppress(Exception):  # the report must not fail on a property of the user's
            if hasattr(value, "shape") and hasattr(value, "dtype"):
                operands[name] = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            elif hasattr(value, "extra_repr") and not isinstance(value, type):
                operands[name] = f"{type(value).__name__}({value.extra_repr()})"
    return operands
