"""What a default step costs above a bare loop, counted without a clock: calls of Python and operators of torch; and how
many calls of this project lie between `main` and a backward pass.

A GPU is as fast as the host that feeds it: on small nets each operator takes the host 3 to 10 us, each call 0.1 us.
"""

import sys
import traceback
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.training.callbacks import Callback
from support.commands import ROOT
from support.configs import composed, parts_of
from support.worlds import in_world

BATCH = 4
STEPS = 100  # in which calls are counted, and in as many later ones operators: each changes what the other counts
CALLS, OPERATORS = 34, 1  # more than the bare loop has, at most
FRAMES = [
    "train.py:main",
    "lockstep/launchers/base.py:launch",
    "lockstep/modes/train.py:work",
    "lockstep/training/loop.py:fit",
    "lockstep/training/step.py:__call__",
    "lockstep/strategies/base.py:forward_backward",
]


class Counter(TorchDispatchMode, Callback):
    """Counts in the steps after `first`: in the second epoch, whose steps find what the first epoch has made."""

    def __init__(self, first):
        super().__init__()
        self.first, self.calls, self.operators = first, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))

    def on_step_end(self, run):
        self.after(run.progress.step)

    def after(self, step):
        """`step` steps are done."""
        match step - self.first:
            case 0:
                sys.setprofile(self._count)
            case n if n == STEPS:
                sys.setprofile(None)
                self.__enter__()
            case n if n == 2 * STEPS:
                self.__exit__(None, None, None)

    def _count(self, frame, event, arg):
        self.calls += event == "call" and frame.f_code.co_name not in ("after", "on_step_end")

    @property
    def found(self):
        return self.calls / STEPS, self.operators / STEPS


def bare_steps():
    images, targets = torch.randint(0, 256, (1437, 1, 8, 8), dtype=torch.uint8), torch.randint(0, 10, (1437,))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, fused=True)
    order, counter = torch.randperm(len(images)), Counter(1)
    for step in range(1, 2 * STEPS + 2):
        rows = order[BATCH * step : BATCH * (step + 1)]
        optimizer.zero_grad()
        F.cross_entropy(net(images[rows].float().div_(255)), targets[rows]).backward()
        optimizer.step()
        counter.after(step)
    return counter.found


def our_steps(config):
    from lockstep import build
    from lockstep.distributed.world import join_world
    from lockstep.loggers.base import Loggers, RunInfo
    from lockstep.training import exchange
    from lockstep.training.loop import fit

    torch.set_num_threads(1)
    exchange.PAUSE = 1e9  # the clock asks for no exchange: there is one for each log
    snapshots = MagicMock(every_steps=0, due_by_clock=lambda: False, due_after_step=lambda: False)
    with join_world("gloo", 60) as world:
        run = build.build_run(config, world, parts_of(config))
        run.callbacks = [counter := Counter(first=len(run.loaders.train) // BATCH + 10)]
        fit(run, [], None, snapshots, Loggers([]), RunInfo(run, {"sweep": None}))
    return counter.found


def test_a_step_has_few_calls_and_no_operators_above_a_bare_loop(tmp_path):
    words = ["model=linear", f"trainer.batch_size={BATCH}", "trainer.epochs=2", f"run_dir={tmp_path}"]
    (ours,), bare = in_world(1, our_steps, composed(*words)), bare_steps()
    calls, operators = ours[0] - bare[0], ours[1] - bare[1]
    print(f"calls: {bare[0]:.1f} bare, {calls:+.1f}; operators: {bare[1]:.1f} bare, {operators:+.1f}")
    assert calls <= CALLS
    assert operators <= OPERATORS


class Noting(nn.Linear):
    """It writes down the stack of its newest backward pass."""

    def __init__(self, classes):
        super().__init__(64, classes)

    def forward(self, inputs):
        outputs = super().forward(inputs.flatten(1))
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.note())
        return outputs

    def note(self):
        stack = traceback.extract_stack()
        Path("frames.txt").write_text("\n".join(f"{frame.filename}:{frame.name}" for frame in stack))


def test_a_backward_pass_is_six_calls_below_main(train, tmp_path):
    """In the first step one more looks at what the net draws, and in all steps of a net that has dropout."""
    words = ["model=linear", "~model.shape", "model._target_=test_step_costs.Noting", "trainer.max_steps=2"]
    train(*words, "hydra.run.dir=run", PYTHONPATH=ROOT / "tests" / "runs")
    places = [line.partition(f"{ROOT}/src/") for line in (tmp_path / "frames.txt").read_text().splitlines()]
    own = [place for _, found, place in places if found]
    assert own[own.index("train.py:main") :] == FRAMES
