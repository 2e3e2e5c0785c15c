"""Optimizers of torch under strategy=fsdp: one process's numbers, also over a resume at another number of ranks."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lockstep.tasks.regression import Regression
from lockstep.training.state import TrainSettings, TrainState
from torch import Tensor, nn

from lockstep.distributed.world import World, join_world
from lockstep.snapshots.state import collect_state, model_state, plain_copy, restore_state
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.gradient_sync import GradientSync
from support.worlds import in_world

OPTIMIZERS = ["Adadelta", "Adagrad", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"]
BEFORE, AFTER = range(3), range(3, 7)  # steps around the resume
SAMPLES = 7  # on 3 ranks 3, 2 and 2
OPTIONS = {"ASGD": {"t0": 2}, "RMSprop": {"momentum": 0.9, "centered": True}}  # average, momentum, second moments


def fresh(name: str, world: World) -> TrainState:
    torch.manual_seed(0)
    strategy = FSDP(1, True, [], 1, find_unused_parameters=False)
    # On 3 ranks one holds nothing of the last layer.
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    strategy.setup(model, world, GradientSync())
    optimizer = getattr(torch.optim, name)(strategy.module.parameters(), lr=0.05, **OPTIONS.get(name, {}))
    task = Regression({"loss": "min"}, "loss", None, {})
    return TrainState(TrainSettings(epochs=1, epoch_samples=SAMPLES), task, strategy, optimizer)


def take(state: TrainState, steps: range) -> None:
    strategy, world = state.strategy, state.strategy.world

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return state.task(outputs, targets)[0] / SAMPLES

    for step in steps:
        values = torch.randn(SAMPLES, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = values.tensor_split(world.size)[world.rank]
        strategy.forward_backward(mine[:, :5], mine[:, 5:], loss, nullcontext(), True)
        state.optimizer.step()
        state.optimizer.zero_grad()


def run(folder: Path, begins: bool) -> dict[str, dict[str, list[float]]]:
    """{optimizer: {parameter: its values}}, complete on rank 0. begins: it saves the first steps to `folder` before."""
    found = {}
    with join_world("gloo", 60) as world:
        for name in OPTIMIZERS:
            if begins:
                state = fresh(name, world)
                take(state, BEFORE)
                saved = collect_state(state, state.meter.totals(), {}, state.strategy.full_state)
                if world.is_rank_zero:
                    torch.save(plain_copy(saved), folder / f"{name}.pt")
                world.barrier()
            state = fresh(name, world)
            restore_state(state, torch.load(folder / f"{name}.pt", weights_only=True))
            take(state, AFTER)
            whole = model_state(state.strategy)
            found[name] = {key: value.flatten().tolist() for key, value in whole.items()} if world.is_rank_zero else {}
        world.barrier()
    return found


def test_optimizers_of_torch_step_on_parts_as_on_whole_weights(tmp_path: Path) -> None:
    folders = {size: tmp_path / str(size) for size in (1, 3)}
    for folder in folders.values():
        folder.mkdir()
    expected, *_ = in_world(1, run, folders[1], True)
    together, *_ = in_world(3, run, folders[3], True)
    moved, *_ = in_world(3, run, folders[1], False)
    for name in OPTIMIZERS:
        for found in (together, moved):
            assert found[name].keys() == expected[name].keys()
            for key, values in expected[name].items():
                assert found[name][key] == pytest.approx(values, rel=1e-9, abs=1e-12), name
