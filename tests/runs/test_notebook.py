"""docs/examples/my_loop.py, which trains without the command line, in a process of its own."""

import os
import re
import sys

import pytest

from support.commands import BY_LOSS, ROOT
from support.configs import composed
from support.worlds import in_world, train


def test_the_script_gives_the_numbers_of_the_command(start, tmp_path):
    script = (ROOT / "docs" / "examples" / "my_loop.py").read_text()
    assert len(script.split("with join_world")[1].splitlines()) <= 15
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    output = start(sys.executable, "-c", script, PYTHONPATH=path).finish().output
    losses = re.findall(r"'loss': ([\d.]+)", output)
    assert len(losses) == 3
    options = ["model=mlp", "scheduler=constant", "trainer.epochs=3", BY_LOSS, "logger=[]"]
    options += [f"run_dir={tmp_path}/run"]
    (objective,) = in_world(1, train, composed(*options, whole=False))
    assert float(losses[-1]) == pytest.approx(objective, rel=1e-4)
