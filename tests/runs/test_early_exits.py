"""A module of the user's that ends the process before the training: a failure, whatever its exit code."""

import pytest

from support.commands import PYTHON_TRAIN

MODULE = """
import sys
from torch import nn

from lockstep.data.vision import Digits

{import_time}

class Net(nn.Module):
    def __init__(self):
        sys.exit(0)

class Data(Digits):
    def prepare(self):
        sys.exit(0)
"""
NET = "model._target_=ends.Net"
PREPARE = "dataset._target_=ends.Data"


@pytest.mark.parametrize(
    ("typed", "at_import", "launch"),
    [(NET, True, "env"), (NET, False, "fork"), (PREPARE, False, "env"), (PREPARE, False, "torchrun")],
)
def test_an_exit_with_0_before_the_training_is_a_failure(start, tmp_path, typed, at_import, launch):
    (tmp_path / "ends.py").write_text(MODULE.format(import_time="sys.exit(0)" if at_import else ""))
    run = start(*PYTHON_TRAIN, typed, f"launch={launch}", PYTHONPATH=tmp_path).finish(1)
    assert "exit code 0" in run.output
    assert "ends.py" in run.output
