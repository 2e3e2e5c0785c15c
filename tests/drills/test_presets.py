"""The presets reach what they promise."""

import os

import pytest

from support.commands import PYTHON_TRAIN
from support.event_files import scalars

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where MNIST is"),
]


@pytest.mark.skipif(os.environ.get("LOCKSTEP_NETS") != "all", reason="three minutes; make matrices runs it")
@pytest.mark.timeout(600)
def test_the_mnist_preset_reaches_99_percent(start):
    run = start(*PYTHON_TRAIN, "launch=fork", "launch.nproc_per_node=2", "experiment=mnist_ddp").finish(limit=500)
    assert scalars(run.folder)["test/accuracy"][-1][1] >= 0.99


def test_mnist_airbench_learns_in_a_third_of_an_epoch(start):
    """Six epochs take minutes; docs/recipes.md has their accuracy. The average follows the weights of few steps."""
    words = ["launch=fork", "launch.nproc_per_node=2", "backend=gloo", "experiment=mnist_airbench", "trainer.epochs=1"]
    words += ["trainer.max_steps=80", "trainer.ema.decay=0.9"]
    run = start(*PYTHON_TRAIN, *words).finish(limit=230)
    assert scalars(run.folder)["test/accuracy"][-1][1] >= 0.985
