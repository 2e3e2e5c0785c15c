"""The presets reach what they promise."""

import os

import pytest

from support.commands import TORCHRUN, TRAIN
from support.event_files import scalars

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where MNIST is"),
]


def test_the_mnist_preset_reaches_99_percent(start):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, "experiment=mnist_ddp").finish()
    assert scalars(run.folder)["test/accuracy"][-1][1] >= 0.99
