"""strategy=tensor_parallel: what a rank holds, and one process's numbers with data parallel beside it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.data.loader import LoadedPart
from lockstep.errors import ConfigError
from lockstep.loggers.csv_logger import read_rows
from lockstep.models.gpt import gpt
from lockstep.strategies.sharded import Sharded, styles_of_plan
from lockstep.tasks.base import Task
from support.commands import ema
from support.configs import composed, with_values
from support.run_folders import newest_snapshot
from support.small_text import small_gpt
from support.worlds import distance, in_world, train_all, weights


def tensor_parallel(plan: list[dict[str, str]], replicate: int = 1) -> Sharded:
    return Sharded(replicate, True, [], 1000, plan)


PLAN = [{"*.queries_keys_values": "colwise"}, {"*.widen": "colwise"}, {"*.projection": "rowwise"}]


def grad_norms(folder: Path) -> list[float]:
    return [value for _, tag, value in read_rows(folder / "metrics.csv") if tag == "train/grad_norm"]


def test_two_groups_of_two_ranks_have_one_processs_numbers(tmp_path: Path) -> None:
    options = [ema(0.8), "trainer.gradient_accumulation_steps=2", "trainer.max_steps=6", "logging.every=1"]
    base = small_gpt(tmp_path, *options, "logger=[csv]", "trainer.max_grad_norm=0.1", "optimizer.fused=false")
    ways = ("replicate", "shard")  # the two groups hold the same, or fsdp cuts what they hold
    spread = {way: composed(*base, "strategy=tensor_parallel", f"strategy.{way}=2") for way in ways}
    in_world(1, train_all, [composed(*base, f"run_dir={tmp_path / 'alone'}")])
    for way, cfg in spread.items():  # torch keeps what it has made for the groups of a world
        in_world(4, train_all, [with_values(cfg, f"run_dir={tmp_path / way}")])
    alone = newest_snapshot(tmp_path / "alone")
    assert len(grad_norms(tmp_path / "alone")) == 6
    for way in ways:
        assert distance(weights(tmp_path / "alone"), weights(tmp_path / way)) < 1e-11
        assert grad_norms(tmp_path / way) == pytest.approx(grad_norms(tmp_path / "alone"), rel=1e-9)
        saved = newest_snapshot(tmp_path / way)
        assert saved["meter"]["totals"].tolist() == pytest.approx(alone["meter"]["totals"].tolist(), rel=1e-12)


def values_after_setup(rank_plan: Any) -> dict[str, int]:
    """{layer: how many of its weights this rank holds}"""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync

    with join_world("gloo", 60) as world:
        strategy = tensor_parallel(rank_plan)
        strategy.setup(
            gpt([8], 28, layers=1, heads=2, width=16, dropout=0.0, tied=True, variant="gpt2"),
            Task().outputs,
            world,
            GradientSync(),
        )
        held: dict[str, Any] = dict(strategy.model.named_parameters())
        world.barrier()  # who leaves while the other still connects ends it
        return {
            name: (value.to_local() if hasattr(value, "to_local") else value).numel() for name, value in held.items()
        }


def test_a_rank_holds_half_of_each_matrix_that_the_plan_names() -> None:
    for held in in_world(2, values_after_setup, PLAN):
        assert held["block1.attention.queries_keys_values.weight"] == 3 * 16 * 16 // 2
        assert held["block1.attention.projection.weight"] == 16 * 16 // 2
        assert held["block1.mlp.widen.weight"] == held["block1.mlp.projection.weight"] == 4 * 16 * 16 // 2
        assert held["embedding.tokens.weight"] == 28 * 16


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ([("embedding.tokens", "rowwise")], "embedding.tokens, whose weight is also .*model.tied=false"),
        ([("block1.mlp.wide", "colwise")], "no module is named block1.mlp.wide; type model=gpt"),
    ],
)
def test_a_plan_that_cuts_nothing_or_one_of_two_names_is_refused(plan: list[tuple[str, str]], said: str) -> None:
    with torch.device("meta"):
        model = gpt([8], 28, layers=1, heads=2, width=24, dropout=0.0, tied=True, variant="gpt2")
    with pytest.raises(ConfigError, match=said):
        styles_of_plan(model, plan)


@pytest.mark.parametrize("reentrant", [False, True])
def test_cut_layers_in_a_checkpointed_block_with_an_activation_in_place(reentrant: bool) -> None:
    for apart in in_world(2, distance_of_gradients, reentrant):
        assert apart < 1e-12


def part_of(inputs: torch.Tensor, targets: torch.Tensor) -> LoadedPart:
    """A whole batch."""
    return LoadedPart(0, 0, inputs, targets, torch.arange(len(inputs)))


class Recomputed(nn.Sequential):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ReLU(inplace=True))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=self.reentrant)
        return out


def distance_of_gradients(reentrant: bool) -> float:
    """From those of the plain model."""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync

    with join_world("gloo", 60, None) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Recomputed(reentrant), nn.Linear(4, 4), nn.ReLU(inplace=True)).double()
        plain, inputs, targets = copy.deepcopy(model), torch.rand(3, 4).double(), torch.rand(3, 4).double()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        strategy = tensor_parallel([{"1.0": "colwise"}, {"1.2": "rowwise"}, {"2": "gathered"}])
        strategy.setup(model, Task().outputs, world, GradientSync())
        strategy.forward_backward(part_of(inputs, targets), nn.functional.mse_loss, torch.ones(()).double(), last=True)
        return distance_from(plain, model)


class UsedTwice(nn.Module):
    """One PReLU between two layers and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.relu = nn.Linear(4, 8), nn.Linear(8, 4), nn.PReLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.relu(self.narrow(self.relu(self.wide(inputs))))
        return out


def test_a_whole_weight_that_is_used_inside_and_outside_gets_its_whole_gradient() -> None:
    for apart in in_world(2, distance_of_one_used_twice):
        assert apart < 1e-12


def distance_of_one_used_twice() -> float:
    """From the gradients of the plain model."""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync

    with join_world("gloo", 60, None) as world:
        torch.manual_seed(0)
        model = UsedTwice().double()
        plain, inputs, targets = copy.deepcopy(model), torch.randn(3, 4).double(), torch.rand(3, 4).double()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        strategy = tensor_parallel([{"wide": "colwise"}, {"narrow": "rowwise"}])
        strategy.setup(model, Task().outputs, world, GradientSync())
        strategy.forward_backward(part_of(inputs, targets), nn.functional.mse_loss, torch.ones(()).double(), last=True)
        return distance_from(plain, model)


def distance_from(plain: nn.Module, cut: nn.Module) -> float:
    found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in cut.parameters()]
    pairs = zip(found, plain.parameters(), strict=True)
    return max(float((gradient - p.grad).abs().max()) for gradient, p in pairs)


def test_heads_and_stages_draw_masks_of_their_own() -> None:
    (inside, outside, numbers), (inside_too, outside_too, numbers_too) = in_world(2, masks)
    assert inside != inside_too
    assert outside == outside_too
    assert set(numbers).isdisjoint(numbers_too)


def masks() -> tuple[list[bool], list[bool], list[int]]:
    """The masks of dropout between cut layers and behind them, and the numbers of a pipeline's parts."""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync
    from lockstep.strategies.pipeline import Pipeline

    with join_world("gloo", 60, None) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 64), nn.Dropout(), nn.Linear(64, 32), nn.Dropout())
        strategy, kept = tensor_parallel([{"0": "colwise"}, {"2": "rowwise"}]), list[list[bool]]()
        strategy.setup(model, Task().outputs, world, GradientSync())
        for dropout in (model[1], model[3]):
            dropout.register_forward_hook(lambda module, inputs, outputs: kept.append((outputs == 0).tolist()))
        torch.manual_seed(1)
        part = part_of(torch.ones(1, 2), torch.ones(1))
        strategy.forward_backward(part, lambda outputs, targets: outputs.sum(), torch.ones(()), last=True)
        pipeline = Pipeline("GPipe", 2)
        pipeline.setup(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Task().outputs, world, GradientSync())
        return *kept, [part.number for part in pipeline.parts(0, 8, 2)]
