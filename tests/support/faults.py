"""Parts of a training that break on one rank, in the way that FAULT names: "place/kind:rank:step".

The jobs of a sweep may each break in a way of their own: see SweptModel.
The places are build, data, forward, backward, optimizer and evaluation. The other ranks go on.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.models.tutorial import mlp
from support.digits import Samples


class WithoutText(Exception):
    """It cannot describe itself."""

    def __str__(self) -> str:
        raise ValueError("no text")


def _raise(error: Exception | str) -> None:
    raise RuntimeError(error) if isinstance(error, str) else error


def _memory_limit() -> None:
    """As `ulimit -v` does: 256 MB more than the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(2**30)


def _segfault_once() -> None:
    """In the first attempt of a run only: it leaves the file `crashed` in the current folder."""
    if not Path("crashed").exists():
        Path("crashed").touch()
        ctypes.string_at(0)


def _wrong_shape() -> None:
    features = torch.ones(3, 4)
    weight = torch.ones(5, 6)
    features @ weight


def _recursion() -> None:
    _recursion()


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _kill_beside_child() -> None:
    """The child keeps copies of the rank's connections open."""
    if os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(15)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _damage_heap() -> None:
    """glibc says "free(): invalid pointer" and ends the process."""
    buffer = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(buffer) + 8))


def _end_in_children() -> None:
    """Two children whose ends go through the functions of the rank that they are copies of, and which would wait for
    threads that a fork does not have."""
    for leave in (lambda: _raise("a mistake in the child"), lambda: sys.exit(7)):
        if os.fork() == 0:
            leave()
        _, status = os.wait()
        print(f"the child has ended with {os.waitstatus_to_exitcode(status)}", flush=True)


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": lambda: _raise("a mistake in the model"),
    "unicode": lambda: _raise("größer als erlaubt: \u2603\n" * 50),
    "long": lambda: _raise("x" * 10_000 + "\nframe\n" * 1000),
    "no_text": lambda: _raise(WithoutText()),
    "escapes": lambda: _raise("red \x1b[31m, half a character \ud800"),
    "own_connection": lambda: _raise(ConnectionError("Connection closed by peer: a server of the user's")),
    "children": _end_in_children,
    "gpu": lambda: torch.ones(1).cuda(),
    "shape": _wrong_shape,
    "none": lambda: None,
    "memory_limit": _memory_limit,
    "more_memory": lambda: [b"1" * 2**26 for _ in range(64)],  # the kernel ends it where its memory is limited
    "memory": lambda: torch.empty(2**50),
    "target": lambda: torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([0, 7])),
    "disk": lambda: _raise(OSError(28, "No space left on device")),
    "recursion": _recursion,
    "kill": _signal(signal.SIGKILL),
    "kill_beside_child": _kill_beside_child,
    "cpu_limit": _signal(signal.SIGXCPU),
    "bus": _signal(signal.SIGBUS),
    "segfault": lambda: ctypes.string_at(0),
    "segfault_once": _segfault_once,
    "abort": os.abort,
    "heap": _damage_heap,
    "native_exit": lambda: ctypes.CDLL(None)._exit(0),
    "exit3": lambda: os._exit(3),
    "sysexit": lambda: sys.exit(0),
    "hang": lambda: time.sleep(1000),
}


def _break_at(place: str, step: int) -> None:
    """Break if FAULT says so: on this rank, or on "all". step: counted from 1."""
    where, rank, at = os.environ.get("FAULT", "none/none:0:0").split(":")
    wanted, _, kind = where.partition("/")
    if wanted == place and int(at) == step and rank in (os.environ.get("RANK", "0"), "all"):
        FAULTS[kind]()


class FaultyBackward(torch.autograd.Function):
    """The identity, whose backward pass breaks."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, step: int) -> Tensor:
        ctx.step = step
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _break_at("backward", ctx.step)
        return gradient, None


class FaultyModel(torch.nn.Module):
    """An mlp that breaks while it is built, or in a forward or backward pass of training or of an evaluation."""

    def __init__(self, shape: list[int], classes: int, width: int = 128, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = mlp(shape, classes, width, depth, dropout)
        self.steps = 0
        if next(self.net.parameters()).device.type != "meta":
            _break_at("build", 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        if not self.training:
            _break_at("evaluation", 1)
            return outputs
        self.steps += 1
        _break_at("forward", self.steps)
        return FaultyBackward.apply(outputs, self.steps)


class SweptModel(FaultyModel):
    """A FaultyModel that breaks on one rank, in its third forward pass, in the way that `model.kind` names."""

    def __init__(self, shape: list[int], classes: int, kind: str, rank: int = 1) -> None:
        os.environ["FAULT"] = f"forward/{kind}:{rank}:3"
        super().__init__(shape, classes)


class FaultyDigits(Samples):
    """One sample of the training data breaks: FAULT's step is its place in the order of access."""

    first = 256

    def before(self, index: int) -> None:
        if self.train:
            _break_at("data", self.reads)


class FaultySGD(torch.optim.SGD):
    """Breaks in a step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        _break_at("optimizer", self.steps)
        return super().step(closure)
