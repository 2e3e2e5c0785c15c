"""What a default step costs above a bare loop, counted without a clock: calls of Python, and operators of torch.

A GPU is as fast as the host that feeds it: on small nets each operator takes the host 3 to 10 us, each call 0.1 us.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.configs import composed, parts_of
from support.worlds import in_world

STEPS, BATCH = 100, 4  # three times in one epoch
CALLS, OPERATORS = 75, 4  # more than the bare loop has, at most


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(take_steps: Callable[[], object]) -> tuple[float, float]:
    """(calls, operators) of a step. Called twice: each changes what the other counts."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    take_steps()
    sys.setprofile(None)
    with Operators() as operators:
        take_steps()
    return calls / STEPS, operators.count / STEPS


def bare_steps() -> Callable[[], None]:
    images, targets = torch.randint(0, 256, (1437, 1, 8, 8), dtype=torch.uint8), torch.randint(0, 10, (1437,))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, fused=True)

    def take() -> None:
        order = torch.randperm(len(images))
        for start in range(0, STEPS * BATCH, BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            F.cross_entropy(net(images[rows].float().div_(255)), targets[rows]).backward()
            optimizer.step()

    return take


def our_steps(config: Any, world: Any) -> Callable[[], None]:
    from lockstep import build
    from lockstep.loggers.base import Loggers
    from lockstep.training.exchange import Exchange
    from lockstep.training.loop import train_epoch

    run = build.build_run(config, world, parts_of(config))
    snapshots: Any = SimpleNamespace(every_steps=0, due_by_clock=lambda: False, due_after_step=lambda: False)
    exchange, batches = Exchange(run, Loggers([]), snapshots, delayed=False), run.loaders.train.batches(run.progress)

    def take() -> None:
        run.clock.last_step = run.progress.step + STEPS
        train_epoch(run, batches, exchange)

    return take


def costs(config: Any) -> list[tuple[float, float]]:
    from lockstep.distributed.world import join_world

    torch.set_num_threads(1)
    with join_world("gloo", 60) as world:
        found = []
        for steps in (bare_steps(), our_steps(config, world)):
            steps()  # the first ones make what the others find
            found.append(counted(steps))
        return found


def test_a_step_has_few_calls_and_no_operators_above_a_bare_loop(tmp_path: Path) -> None:
    words = ["model=linear", f"trainer.batch_size={BATCH}", "trainer.epochs=50", f"run_dir={tmp_path}"]
    ((bare, ours),) = in_world(1, costs, composed(*words))
    calls, operators = ours[0] - bare[0], ours[1] - bare[1]
    print(f"calls: {bare[0]:.1f} bare, {calls:+.1f}; operators: {bare[1]:.1f} bare, {operators:+.1f}")
    assert calls <= CALLS
    assert operators <= OPERATORS
