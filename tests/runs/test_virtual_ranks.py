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
from support.run_folders import newest_snapshot
from support.worlds import in_world, same_bits, train_all

SHORT = ["strategy=virtual_ranks", "strategy.count=8", "optimizer=adamw", "trainer.epochs=1", "trainer.max_steps=5"]
SHORT += ["scheduler=constant", "trainer.batch_size=61", "logger=[]"]
CONSTANTS = ["dataset=random", "model=linear", "model._target_=support.models.WithConstants"]
MODELS = {
    "batch norm": ["model=convnet"],
    "dropout": ["model=mlp", "model.dropout=0.3"],
    "constants": [*CONSTANTS, "parameters.freeze=[unused]"],
}


@pytest.mark.whole
def test_any_number_of_ranks_and_stops_end_in_identical_bits(tmp_path: Path, train: Any) -> None:
    bases = {name: composed(*SHORT, *model) for name, model in MODELS.items()}
    stopped, spawn = tmp_path / "stopped", ["launch=spawn", "launch.nproc_per_node=2", "trainer.max_steps=2"]
    for size, last in ((1, 1), (2, 2), (4, 4), (8, 5)):
        runs = [with_values(cfg, f"run_dir={tmp_path / name / str(size)}") for name, cfg in bases.items()]
        goes_on = with_values(bases["batch norm"], f"run_dir={stopped}", f"trainer.max_steps={last}")
        in_world(size, train_all, [*runs, *([goes_on] if size != 2 else [])])
        if size == 2:  # another launcher
            train(*SHORT, *MODELS["batch norm"], *spawn, f"hydra.run.dir={stopped}")
        assert all(same_bits(tmp_path / name / "1", tmp_path / name / str(size)) for name in MODELS), size
    assert same_bits(tmp_path / "batch norm" / "1", stopped)
    moments, expected = (newest_snapshot(run)["optimizer"] for run in (stopped, tmp_path / "batch norm" / "1"))
    assert all(torch.equal(moments[name][key], value) for name in expected for key, value in expected[name].items())
    saved = torch.load(tmp_path / "constants" / "2" / "model.pt", weights_only=True)
    WithConstants([saved["layer.weight"].shape[1]], 1).assert_constant(saved)
    assert saved["seen"] == 5 * 7  # of the last virtual rank: 61 samples in five parts of 8 and three of 7


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
