"""What a default step costs above a bare loop, counted without a clock: calls of Python, and operators of torch.

A GPU is as fast as the host that feeds it: on small nets each operator takes the host 3 to 10 us, each call 0.1 us.
"""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import nn

from support.configs import composed, parts_of
from support.step_costs import STEPS, Counter, Counting
from support.worlds import in_world

BATCH = 4
CALLS, OPERATORS = 34, 1  # more than the bare loop has, at most


def bare_steps() -> tuple[float, float]:
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


def our_steps(config: Any) -> tuple[float, float]:
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
        run.callbacks = [counting := Counting(first=run.epoch_samples // BATCH + 10)]
        fit(run, [], None, snapshots, Loggers([]), RunInfo(run, {"sweep": None}))
    return counting.counter.found


def test_a_step_has_few_calls_and_no_operators_above_a_bare_loop(tmp_path: Path) -> None:
    words = ["model=linear", f"trainer.batch_size={BATCH}", "trainer.epochs=2", f"run_dir={tmp_path}"]
    (ours,), bare = in_world(1, our_steps, composed(*words)), bare_steps()
    calls, operators = ours[0] - bare[0], ours[1] - bare[1]
    print(f"calls: {bare[0]:.1f} bare, {calls:+.1f}; operators: {bare[1]:.1f} bare, {operators:+.1f}")
    assert calls <= CALLS
    assert operators <= OPERATORS
