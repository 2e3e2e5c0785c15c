"""strategy=virtual_ranks: the same bits at every world size."""

import pytest
import torch
from torch import nn

from lockstep.data.loader import LoadedPart
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
def test_any_number_of_ranks_and_stops_end_in_identical_bits(tmp_path, train):
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


class Remembering(nn.Module):
    """Its buffer is another tensor after each forward pass. It has a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.fixed, self.trained = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
        self.fixed.requires_grad_(False)
        self.register_buffer("total", torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs):
        self.total = self.total + inputs.sum()
        return self.trained * self.fixed * inputs


def one_step(parts):
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
            targets = {"one": inputs, "other": inputs}  # what counts is the samples in it
            loaded = LoadedPart(number, 0, inputs, targets, torch.arange(len(part)))
            last, weight = number % len(parts) == len(parts) - 1, torch.ones((), dtype=torch.float64)
            strategy.forward_backward(loaded, lambda outputs, _: outputs.sum(), weight, last)
    return model.trained.grad.item(), model.fixed.grad, model.total.item()


def test_each_virtual_rank_begins_with_the_buffers_of_the_last_pass():
    found = in_world(1, one_step, [[1.0, 2.0, 3.0], [10.0], [-5.0, 1.0]])[0]
    assert found == (2 * 12.0, None, 2 * (3 * 6 + 1 * 10 + 2 * -4) / 6)
