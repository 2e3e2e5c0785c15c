"""The presets reach what they promise. Small, cifar10_speed learns, and is the same on two ranks and after a resume."""

import os

import pytest
import torch

from lockstep.data import Tensors
from lockstep.models.airbench import Whitening
from support.commands import PYTHON_TRAIN, own_data
from support.configs import composed, with_values
from support.event_files import scalars
from support.worlds import distance, in_world, same_bits, train_all, weights

pytestmark = pytest.mark.drill
needs_data = pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where MNIST is")
TWO_RANKS = [*PYTHON_TRAIN, "launch=fork", "launch.nproc_per_node=2", "backend=gloo"]
CHANNELS = ["dataset.classes=10", "dataset.mean=[0.4914,0.4822,0.4465]", "dataset.std=[0.2470,0.2435,0.2616]"]


@needs_data
@pytest.mark.skipif(os.environ.get("LOCKSTEP_NETS") != "all", reason="three minutes; make matrices runs it")
@pytest.mark.timeout(600)
def test_the_mnist_preset_reaches_99_percent(start):
    run = start(*TWO_RANKS, "experiment=mnist_ddp").finish(limit=500)
    assert scalars(run.folder)["test/accuracy"][-1][1] >= 0.99


@needs_data
def test_mnist_airbench_learns_in_a_third_of_an_epoch(start):
    """Six epochs take minutes; docs/recipes.md has their accuracy. The average follows the weights of few steps."""
    words = ["experiment=mnist_airbench", "trainer.epochs=1", "trainer.max_steps=80", "trainer.ema.decay=0.9"]
    run = start(*TWO_RANKS, *words).finish(limit=230)
    assert scalars(run.folder)["test/accuracy"][-1][1] >= 0.985


def images(train):
    """In place of CIFAR-10's: 100 for training, 30 for tests, each the picture of its class under noise."""
    count, generator = 100 if train else 30, torch.Generator().manual_seed(int(train))
    noise = torch.randint(0, 64, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    pictures = torch.randint(0, 192, (10, 3, 8, 8), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    targets = torch.arange(count) % 10
    return Tensors(noise + pictures.repeat_interleave(4, 2).repeat_interleave(4, 3)[targets], targets)


def test_cifar10_speed_learns_and_is_the_same_on_two_ranks_and_after_a_resume(tmp_path):
    # SGD's learning rates are for 2000 samples a step, and these are 20.
    groups = "parameters.groups=[{match:head,use_muon:false,lr:13}]"
    options = ["trainer.precision=fp64", "trainer.batch_size=20", "optimizer.others.lr=1", groups, "trainer.epochs=3"]
    small = [*own_data(f"{__name__}.images"), *CHANNELS, "model.widths=[8,12,16]", "logger=[tensorboard]"]
    cfg = composed("experiment=cifar10_speed", *small, *options)
    alone, two, moved = (with_values(cfg, f"run_dir={tmp_path / name}") for name in ("alone", "two", "moved"))
    in_world(1, train_all, [alone])
    in_world(2, train_all, [two, with_values(moved, "trainer.pause_after=1"), moved])
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "two")) < 1e-9
    assert same_bits(tmp_path / "two", tmp_path / "moved")
    losses = [loss for _, loss in scalars(tmp_path / "alone")["train/loss"]]
    assert losses[-1] < losses[0] - 0.1

    mean, std = (torch.tensor(cfg.dataset[name], dtype=torch.float64)[:, None, None] for name in ("mean", "std"))
    expected = Whitening(3).double()
    expected.set_weights_from((images(train=True).inputs / 255 - mean) / std)
    saved = torch.load(tmp_path / "two" / "model.pt", weights_only=True)
    torch.testing.assert_close(saved["whiten.weight"], expected.weight.detach(), rtol=1e-5, atol=1e-6)
