"""Parts of a training that break, hang or take long at places, as FAULT says: "place/kind:rank:step", several with a
comma between them.

The places are those of `break_at` below. A kind is a key of FAULTS, or seconds. rank: a number, or "all". step: which
pass, sample or call of this rank, counted from 1; %3 is each third one. Who comes there leaves the file
`in-<place>-<rank>` in the current folder. Without FAULT every part works.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.data import Pair
from lockstep.distributed.environment import read_rank_info
from lockstep.loggers.base import Logger
from lockstep.models.tutorial import mlp
from lockstep.strategies.ddp import DDP
from lockstep.training.callbacks import Callback
from support.commands import own_data
from support.digits import Samples


class WithoutText(Exception):
    """It cannot describe itself."""

    def __str__(self):
        raise ValueError("no text")


def _raise(error):
    raise RuntimeError(error) if isinstance(error, str) else error


def _memory_limit():
    """As `ulimit -v` does: 256 MB more than the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(2**30)


def _wrong_shape():
    features = torch.ones(3, 4)
    weight = torch.ones(5, 6)
    features @ weight


def _recursion():
    _recursion()


def _signal(number):
    return lambda: os.kill(os.getpid(), number)


def _kill_beside_child():
    """The child keeps copies of the rank's connections open, so no other rank sees that they are closed. It is the
    user's to end."""
    nothing = subprocess.DEVNULL
    own = {"env": {}, "start_new_session": True}  # so that nobody takes it for one that this project has left behind
    subprocess.Popen(["sleep", "20"], close_fds=False, stdin=nothing, stdout=nothing, stderr=nothing, **own)
    os.kill(os.getpid(), signal.SIGKILL)


def _damage_heap():
    """glibc says "free(): invalid pointer" and ends the process."""
    buffer = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(buffer) + 8))


def _hold_gil():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _wait_in_kernel():
    """State D: a process that has called vfork waits for its child, and the child for a pipe that nobody opens."""
    os.mkfifo(path := os.path.abspath(f"fifo-{os.getpid()}"))
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)])


FAULTS = {
    "none": lambda: None,
    "raise": lambda: _raise("a mistake in the model"),
    "unicode": lambda: _raise("größer als erlaubt: \u2603\n" * 50),
    "long": lambda: _raise("x" * 10_000 + "\nframe\n" * 1000),
    "no_text": lambda: _raise(WithoutText()),
    "escapes": lambda: _raise("red \x1b[31m, half a character \ud800"),
    "own_connection": lambda: _raise(ConnectionError("Connection closed by peer: a server of the user's")),
    "gpu": lambda: torch.ones(1).cuda(),
    "shape": _wrong_shape,
    "memory_limit": _memory_limit,
    "more_memory": lambda: [b"1" * 2**26 for _ in range(64)],  # the kernel ends it where its memory is limited
    "memory": lambda: torch.empty(2**50),
    "target": lambda: torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([0, 7])),
    "disk": lambda: _raise(OSError(28, "No space left on device")),
    "files": lambda: _raise(OSError(24, "Too many open files")),
    "recursion": _recursion,
    "kill": _signal(signal.SIGKILL),
    "kill_beside_child": _kill_beside_child,
    "cpu_limit": _signal(signal.SIGXCPU),
    "bus": _signal(signal.SIGBUS),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "heap": _damage_heap,
    "native_exit": lambda: ctypes.CDLL(None)._exit(0),
    "exit3": lambda: os._exit(3),
    "sysexit": lambda: sys.exit(0),
    # Hangs, and what only looks like one.
    "hang": lambda: time.sleep(1000),
    "stopped": _signal(signal.SIGSTOP),
    "gil": _hold_gil,
    "kernel": _wait_in_kernel,
    "compile": lambda: torch.compile(torch.sin)(torch.ones(3000)),
    # In place of a sum over the ranks.
    "skip": lambda: None,
    "extra": lambda: (dist.all_reduce(torch.ones(3)), dist.broadcast(torch.ones(3), 0)),
    "operation": lambda: dist.broadcast(torch.ones(3), 0),
    "other_shape": lambda: dist.all_reduce(torch.ones(5)),
}


def break_at(place, step):
    """Break if FAULT says so. Returns whether it did."""
    faults = [one.replace("/", ":").split(":") for one in os.environ.get("FAULT", "").split(",") if one]
    for wanted, kind, rank, at in faults:
        here = read_rank_info().rank
        is_now = step % int(at[1:]) == 0 if at.startswith("%") else step == int(at)
        if wanted == place and is_now and rank in (str(here), "all"):
            Path(f"in-{place}-{here}").touch()
            FAULTS.get(kind, lambda kind=kind: time.sleep(float(kind)))()
            return True
    return False


class FaultyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, step):
        ctx.step = step
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        break_at("backward", ctx.step)
        return gradient, None


class FaultyModel(torch.nn.Module):
    """An mlp that breaks while it is built ("build"), in a pass of training ("forward", "backward") or of an evaluation
    ("evaluation"), or when its weights are read in training ("state")."""

    def __init__(self, shape, classes, width=128, depth=2, dropout=0.0):
        super().__init__()
        self.net = mlp(shape, classes, width, depth, dropout)
        self.passes = {True: 0, False: 0}
        break_at("build", 1)

    def forward(self, inputs):
        outputs = self.net(inputs)
        if self.training != torch.is_grad_enabled():  # in the first step copies pass a part of the batch once more
            return outputs
        self.passes[self.training] += 1
        break_at("forward" if self.training else "evaluation", self.passes[self.training])
        return FaultyBackward.apply(outputs, self.passes[True]) if self.training else outputs

    def state_dict(self, *args, **options):
        if self.passes[True]:
            break_at("state", 1)
        return super().state_dict(*args, **options)


class SweptModel(FaultyModel):
    """A FaultyModel that breaks on one rank, in its third forward pass, in the way that `model.kind` names."""

    def __init__(self, shape, classes, kind, rank=1):
        os.environ["FAULT"] = f"forward/{kind}:{rank}:3"
        super().__init__(shape, classes)


class SummingModel(FaultyModel):
    """A FaultyModel that sums a vector over the ranks in each pass of training ("sum") or evaluation ("tested_sum")."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if not break_at("sum" if self.training else "tested_sum", self.passes[self.training]):
            dist.all_reduce(torch.ones(3))
        return outputs


class FaultyDigits(Samples):
    """A sample breaks: of the training data ("data") or the test data ("tested"), in the order of access."""

    def before(self, index):
        break_at("data" if self.train else "tested", self.reads)


class FewDigits(FaultyDigits):
    first = 64


class FaultyPair(Pair):
    def prepare(self):
        break_at("prepare", 1)


class FaultySGD(torch.optim.SGD):
    """Breaks in a step ("optimizer")."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        break_at("optimizer", self.steps)
        return super().step(closure)


class FaultyDDP(DDP):
    """Breaks before this rank meets the others ("meeting")."""

    def __init__(self):
        super().__init__(bucket_cap_mb=25, find_unused_parameters=False)
        self.asked = 0

    @property
    def binds_one_device(self):
        """A rank asks it before it meets the others, and in the first steps once more."""
        self.asked += 1
        break_at("meeting", self.asked)
        return True


class FaultyLogger(Logger):
    """Breaks before the snapshot of an epoch ("snapshot"), and after the training ("end"), on rank 0."""

    def __init__(self):
        pass

    def epoch(self, summary):
        break_at("snapshot", 1)

    def end(self, run, state):
        break_at("end", 1)


class FaultyCallback(Callback):
    """Breaks after the test ("after_test")."""

    def on_fit_end(self, run):
        break_at("after_test", 1)


MODEL = ["model=mlp", "model._target_=support.faults.FaultyModel"]
PARTS = [
    *own_data("support.faults.FewDigits"),
    *MODEL,
    *(f"{name}._target_=support.faults.Faulty{part}" for name, part in (("dataset", "Pair"), ("strategy", "DDP"))),
    *("optimizer._target_=support.faults.FaultySGD", "+logger.slow._target_=support.faults.FaultyLogger"),
    *("trainer.deterministic=true", "trainer.batch_size=16", "hydra.run.dir=run"),
]


def is_at(folder, place):
    """Whether rank 0 has come to `place`, where it takes long, and rank 1 to a meeting."""
    return (folder / f"in-{place}-{int(place == 'meeting')}").exists()
