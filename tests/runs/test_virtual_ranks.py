"""strategy=virtual_ranks: the same bits at every world size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.data.loader import LoadedPart
from lockstep.distributed.shared_memory import tree_sum
from lockstep.tasks.base import Task
from support.configs import composed, with_values
from support.models import WithConstants
from support.worlds import distance, in_world, same_bits, train_all, weights

SHORT = ["strategy=virtual_ranks", "strategy.count=8", "optimizer=adamw", "trainer.epochs=1", "trainer.max_steps=5"]
SHORT += ["trainer.batch_size=61", "logger=[]"]
CONSTANTS = ["dataset=random", "model=linear", "model._target_=support.models.WithConstants"]
MODELS = {
    "batch norm": ["model=convnet"],
    "dropout": ["model=mlp", "model.dropout=0.3"],
    "constants": [*CONSTANTS, "parameters.freeze=[unused]"],
}


def test_any_number_of_ranks_ends_in_identical_bits(tmp_path: Path) -> None:
    bases = {name: composed(*SHORT, *model) for name, model in MODELS.items()}
    for size in (1, 2, 4, 8):
        runs = [with_values(cfg, f"run_dir={tmp_path / name / str(size)}") for name, cfg in bases.items()]
        in_world(size, train_all, runs)
        assert all(same_bits(tmp_path / name / "1", tmp_path / name / str(size)) for name in MODELS), size
    saved = torch.load(tmp_path / "constants" / "2" / "model.pt", weights_only=True)
    WithConstants([saved["layer.weight"].shape[1]], 1).assert_constant(saved)
    assert saved["seen"] == 5 * 7  # of the last virtual rank: 61 samples in five parts of 8 and three of 7


def test_without_batch_norm_and_dropout_virtual_ranks_are_plain_training(tmp_path: Path) -> None:
    plain = ["model=mlp", "trainer.precision=fp64", "trainer.max_steps=5", "trainer.batch_size=61", "logger=[]"]
    runs = {"plain": [], "three": ["strategy=virtual_ranks", "strategy.count=3"]}
    in_world(1, train_all, [composed(f"run_dir={tmp_path / name}", *plain, *more) for name, more in runs.items()])
    assert 0 < distance(weights(tmp_path / "plain"), weights(tmp_path / "three")) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_a_tree_sum_does_not_depend_on_who_computed_the_rows(count: int) -> None:
    rows = torch.randn(count, 100, generator=torch.Generator().manual_seed(0))
    total = tree_sum(list(rows.clone()))
    torch.testing.assert_close(total, rows.sum(0))
    if count == 3:
        assert torch.equal(total, (rows[0] + rows[1]) + rows[2])
    if count == 7:
        first, last = (rows[0] + rows[1]) + (rows[2] + rows[3]), (rows[4] + rows[5]) + rows[6]
        assert torch.equal(total, first + last)


def sums_are_those_of_one_rank(counts: list[int]) -> list[bool]:
    """Whether this rank gets the bits of one tree, through shared memory and by gathering, for each of `counts`."""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync
    from lockstep.strategies.virtual_ranks import VirtualRanks

    found = []
    with join_world("gloo") as world:
        for count in counts:
            strategy = VirtualRanks(count)
            strategy.setup(nn.Linear(20, 5), Task().outputs, world, GradientSync())
            rows = torch.randn(count, strategy.rows.shape[1], generator=torch.Generator().manual_seed(0))
            for shared_memory in (strategy.shared_memory, None):
                strategy.shared_memory = shared_memory
                strategy.rows[:] = rows[list(strategy.share)]
                strategy._sum_rows()
                found.append(torch.equal(strategy.rows[0], tree_sum(list(rows.clone()))))
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_add_their_shares_as_one_rank_adds_all(size: int) -> None:
    counts = [size * share for share in (1, 2, 3, 4, 7)]
    assert all(all(rank) for rank in in_world(size, sums_are_those_of_one_rank, counts))


class Remembering(nn.Module):
    """Its buffer is another tensor after each forward pass. It has a parameter that is not trained."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.trained = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
        self.fixed.requires_grad_(False)
        self.register_buffer("total", torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.total = self.total + inputs.sum()
        return self.trained * self.fixed * inputs


def one_step(parts: list[list[float]]) -> dict[str, Any]:
    """The gradients and the buffer after two passes of one step, of a virtual rank for each of `parts`."""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync
    from lockstep.strategies.virtual_ranks import VirtualRanks

    model = Remembering()
    with join_world("gloo") as world:
        strategy = VirtualRanks(len(parts))
        strategy.setup(model, Task().outputs, world, GradientSync())
        for number, part in enumerate([*parts, *parts]):
            inputs = torch.tensor(part, dtype=torch.float64)
            targets: Any = {"one": inputs, "other": inputs}  # what counts is the samples in it
            loaded = LoadedPart(number, 0, inputs, targets, torch.arange(len(part)))
            last, weight = number % len(parts) == len(parts) - 1, torch.ones((), dtype=torch.float64)
            strategy.forward_backward(loaded, lambda outputs, _: outputs.sum(), weight, last)
    assert model.trained.grad is not None
    return {"gradient": model.trained.grad.item(), "frozen": model.fixed.grad, "buffer": model.total.item()}


def test_each_virtual_rank_begins_with_the_buffers_of_the_last_pass() -> None:
    found = in_world(1, one_step, [[1.0, 2.0, 3.0], [10.0], [-5.0, 1.0]])[0]
    assert found == {"gradient": 2 * 12.0, "frozen": None, "buffer": 2 * (3 * 6 + 1 * 10 + 2 * -4) / 6}
