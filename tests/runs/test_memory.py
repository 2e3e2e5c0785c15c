"""Where memory is short: blocks that compute again, and what a rank without memory is told."""

import re
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from lockstep.training.setup import checkpoint_activations
from support.commands import ROOT
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights


class Noisy(nn.Module):
    """It draws from torch and numpy, and counts its passes."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.passes += 1
        scale = 1 + 0.1 * float(np.random.rand()) * torch.cos(self.passes)
        return nn.functional.dropout(self.norm(self.linear(x)).tanh() * scale, 0.2, self.training)


def drawing():
    return nn.Sequential(nn.Flatten(), Noisy(64, 32), Noisy(32, 10))


class Wide(nn.Module):
    """Needs 16 MB a sample, in a process that may take `megabytes` more than it had in its first pass."""

    def __init__(self, megabytes):
        super().__init__()
        self.first, self.second, self.megabytes = nn.Linear(64, 10), nn.Linear(64, 10), megabytes

    def forward(self, x):
        limit, most = resource.getrlimit(resource.RLIMIT_DATA)  # not of addresses, of which each thread reserves many
        if limit == most and self.training:
            (used,) = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
            resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 2**10 + self.megabytes * 2**20, most))
        flat = x.flatten(1)
        wide = flat.repeat(1, 2**16)  # (N, 4 Mi) float32
        return self.first(flat) + self.second(wide.view(len(x), -1, 64).mean(1))


NETS = {
    "layer*": ["model=convnet", "trainer.max_steps=4"],
    "1": [f"model._target_={__name__}.drawing", "~model.shape", "~model.classes", "trainer.max_steps=4"],
}
WAYS = {
    1: [["trainer.gradient_accumulation_steps=2"], ["strategy=virtual_ranks", "strategy.count=2"]],
    2: [["strategy=fsdp"]],
    3: [["trainer.batch_size=4"]],
}


@pytest.mark.parametrize("ranks", WAYS)
def test_blocks_that_compute_again_give_the_same_numbers(ranks, tmp_path):
    common, configs = ["trainer.precision=fp64", "trainer.epochs=1", "logger=[]"], []
    for net, words in NETS.items():
        for number, way in enumerate(WAYS[ranks]):
            for name, blocks in (("plain", ""), ("again", f"'{net}'")):
                again = f"trainer.checkpoint_activations=[{blocks}]"
                configs.append(composed(*common, *words, *way, again, f"run_dir={tmp_path}/{net}{number}/{name}"))
    in_world(ranks, train_all, configs)
    for folder in tmp_path.iterdir():
        assert distance(weights(folder / "plain"), weights(folder / "again")) < 1e-12, folder


def kept_bytes(model, inputs):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda one: one):
        model(inputs)
    return sum(kept)


def test_blocks_that_compute_again_keep_less():
    model = instantiate(composed("model=gpt", "model.shape=[32]", "model.classes=50", "dataset=random").model)
    inputs = torch.zeros(4, 32, dtype=torch.int64)
    before, names = kept_bytes(model, inputs), [name for name, _ in model.named_parameters()]
    checkpoint_activations(model, ["block*"])
    assert kept_bytes(model, inputs) < 0.5 * before
    assert [name for name, _ in model.named_parameters()] == names


def test_a_rank_without_memory_is_told_what_to_type(train):
    """The batch of 48 samples needs 768 MB, and both ranks together may take 600."""
    own = ["model._target_=test_memory.Wide", "~model.shape", "~model.classes", "+model.megabytes=300", "launch=fork"]
    words = [*own, "trainer.batch_size=48", "trainer.max_steps=3", "evaluation.batch_size=4"]
    failed = train(*words, "hydra.run.dir=run", code=1, PYTHONPATH=ROOT / "tests" / "runs").output
    assert "this rank has no memory left" in failed
    assert "type trainer.gradient_accumulation_steps=<more>" in failed
