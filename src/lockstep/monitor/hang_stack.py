"""Python stacks as `faulthandler` writes them, and whose code each line belongs to."""

import linecache
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.monitor.code_owner import is_project, is_users

LONGEST_PATH, SHOWN_PARTS = 30, 2
LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
THREAD = re.compile(r"^(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+)")

COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/")
DEBUGGERS = ("/bdb.py", "/pdb.py", "/code.py", "/pydevd")
COLLECTIVES = ("/torch/distributed/", "/lockstep/distributed/", "/torch/nn/parallel/")
STORES = (
    *("/lockstep/distributed/rendezvous.py", "/lockstep/distributed/store.py", "/lockstep/distributed/store_waits.py"),
    "/torch/distributed/rendezvous.py",
)
GROUP_MAKERS = ("_store_based_barrier", "_create_gloo_process_group")  # functions of torch
WAITING_CALLS = (".wait(", ".item(", ".tolist(", ".cpu(", "synchronize(")
LOADERS = ("/torch/utils/data/", "/lockstep/data/")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the code is neither of this project nor of Python nor of an installed package."""
        return is_users(self.file)

    @property
    def source(self) -> str:
        """The line of code, as far as this machine can read it."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def short(self) -> str:
        """file:line, with the last parts of a long path."""
        parts = Path(self.file).parts
        path = self.file if len(self.file) <= LONGEST_PATH else os.path.join("...", *parts[-SHOWN_PARTS:])
        return f"{path}:{self.line}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Stack:
    """The frames of a rank's main thread, the innermost first."""

    frames: tuple[Frame, ...] = ()

    @property
    def top(self) -> Frame | None:
        return self.frames[0] if self.frames else None

    @property
    def users(self) -> Frame | None:
        """The innermost frame of the user's code."""
        return next((frame for frame in self.frames if frame.is_users), None)

    @property
    def place(self) -> Frame | None:
        """The frame to show: the innermost of the user's code, else of this project, else of all."""
        projects = (frame for frame in self.frames if is_project(frame.file))
        return self.users or next(projects, self.top)

    def is_inside(self, parts: Sequence[str]) -> bool:
        """Whether a file of the stack has one of `parts` in its path."""
        return any(part in frame.file for frame in self.frames for part in parts)

    @property
    def is_compiling_or_debugged(self) -> bool:
        # What dynamo has compiled runs below a frame of dynamo, so only the innermost frames count.
        inner = self.frames[: next((i for i, frame in enumerate(self.frames) if frame.is_users), len(self.frames))]
        return Stack(inner).is_inside(COMPILERS) or self.is_inside(DEBUGGERS)

    @property
    def waits_at_store(self) -> bool:
        top = self.top
        if top is None:
            return False
        return top.file.endswith(STORES) or self.makes_group or "store." in top.source

    @property
    def makes_group(self) -> bool:
        """Whether the innermost frame forms a process group, for which the ranks meet at the store."""
        return self.top is not None and self.top.function in GROUP_MAKERS

    def waits_in_collective(self, has_unfinished: bool) -> bool:
        """Whether the innermost frame waits for other ranks.

        has_unfinished: whether a collective that this rank has begun has not ended. Then a backward pass, in which
        DistributedDataParallel waits without a Python frame of its own, and calls that wait for a result count too.
        """
        top = self.top
        if top is None:
            return has_unfinished
        if any(part in top.file for part in COLLECTIVES):
            return has_unfinished or self.makes_group or not self.waits_at_store
        is_call = any(call in top.source for call in WAITING_CALLS)
        return has_unfinished and (top.function == "_engine_run_backward" or is_call)


def parse_stack(text: str, main_thread: str | None = None) -> Stack:
    """The last stack of the main thread in `text`; the stack of the thread that took the signal if none is named.

    main_thread: its identity, as `faulthandler` writes it.
    """
    threads: dict[str, list[Frame]] = {}
    first: str | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        thread = THREAD.match(line)
        if thread is not None:
            frames = threads[thread["ident"]] = []
            if line.startswith("Current"):
                first = thread["ident"]
        elif (match := LINE.match(line)) is not None:
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    wanted = main_thread if main_thread in threads else first
    return Stack(tuple(threads.get(wanted or "", ())))
