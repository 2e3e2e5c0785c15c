"""Models and data that hang on rank 1, in the way that HANG names, in "train" or "evaluation" as HANG_IN says.

With HANG=compile all ranks compile. Other ones are slow, and must not be taken for hangs.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.data import Pair
from support.digits import Samples
from support.slow import mlp

FIRST_BATCH, FIRST_SAMPLE = 12, 150  # where rank 1 hangs: a forward pass in training, a sample
FIRST_EVALUATED = 2


def _sleep() -> None:
    time.sleep(1000)


def _hold_gil() -> None:
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _wait_in_kernel() -> None:
    """State D: a process that has called vfork waits for its child, and the child for a pipe that nobody opens."""
    os.mkfifo(path := os.path.abspath(f"fifo-{os.getpid()}"))
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)])


def _die_with_open_sockets() -> None:
    """A child inherits the sockets, so no other rank sees that they are closed. It is the user's to end."""
    nothing = subprocess.DEVNULL
    own = {"env": {}, "start_new_session": True}  # so that nobody takes it for one that this project has left behind
    subprocess.Popen(["sleep", "20"], close_fds=False, stdin=nothing, stdout=nothing, stderr=nothing, **own)
    os.kill(os.getpid(), signal.SIGKILL)


INSTEAD_OF_SUM: dict[str, Callable[[Tensor], Any]] = {
    "skip": lambda value: None,
    "extra": lambda value: (dist.all_reduce(value), dist.broadcast(value, 0)),
    "operation": lambda value: dist.broadcast(value, 0),
    "shape": lambda value: dist.all_reduce(torch.ones(5)),
}
IN_FORWARD: dict[str, Callable[[], None]] = {
    "forward": _sleep,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": _hold_gil,
    "disk": _wait_in_kernel,
    "dead": _die_with_open_sockets,
}


def _is_here(*kinds: str) -> bool:
    return os.environ.get("RANK") == "1" and os.environ.get("HANG") in kinds


class HangingModel(torch.nn.Module):
    """An mlp that sums a vector over the ranks in each forward pass."""

    def __init__(self, shape: list[int], classes: int) -> None:
        super().__init__()
        self.net, self.passes = mlp(shape, classes), {True: 0, False: 0}

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.device.type == "meta":
            return self.net(inputs)
        self.passes[self.training] += 1
        place, first = os.environ.get("HANG_IN", "train"), FIRST_BATCH if self.training else FIRST_EVALUATED
        is_now = self.passes[self.training] == first and (place == "train") == self.training
        if is_now and os.environ.get("HANG") == "compile":
            torch.compile(torch.sin)(torch.ones(3000))
        if is_now and _is_here(*IN_FORWARD):
            IN_FORWARD[os.environ["HANG"]]()
        if is_now and _is_here(*INSTEAD_OF_SUM):
            INSTEAD_OF_SUM[os.environ["HANG"]](torch.ones(3))
        else:
            dist.all_reduce(torch.ones(3))
        return self.net(inputs)


class HangingDigits(Samples):
    """In a batch of rank 1 a sample takes 1000 s: of the data set that HANG_IN names."""

    def before(self, index: int) -> None:
        place = os.environ.get("HANG_IN", "train")
        is_now = self.train == (place == "train") and self.reads == (FIRST_SAMPLE if self.train else 30)
        if is_now and _is_here("loader", "worker"):
            _sleep()


class UnevenDigits(Samples):
    """Every 100th sample takes SLOW_SAMPLE seconds on rank 1."""

    def before(self, index: int) -> None:
        if index % 100 == 0 and os.environ.get("RANK") == "1":
            time.sleep(float(os.environ["SLOW_SAMPLE"]))


class UnevenModel(torch.nn.Module):
    """An mlp whose first forward pass, and each of an evaluation, takes long, and also to read its weights."""

    def __init__(self, shape: list[int], classes: int) -> None:
        super().__init__()
        self.net, self.is_first = mlp(shape, classes), True

    def state_dict(self, *args: Any, **options: Any) -> Any:
        if not self.is_first:
            time.sleep(float(os.environ["SLOW_SNAPSHOT"]))
        return super().state_dict(*args, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.device.type != "meta":
            if self.is_first:
                time.sleep(float(os.environ["SLOW_FIRST_STEP"]))
                self.is_first = False
            if not self.training:
                time.sleep(float(os.environ["SLOW_EVALUATION"]))
        return self.net(inputs)


class SlowlyPrepared(Pair):
    """Two data sets, after a long download."""

    def prepare(self) -> None:
        time.sleep(float(os.environ["SLOW_PREPARE"]))
