"""Commands that go through Hydra, each answered as it should be: questions, and one step by each launcher.

`.ci/oldest-torch` runs them, too.
"""

import sys

import pytest

from support.commands import TRAIN

SHORT = ["model=mlp", "trainer.max_steps=1", "logger=[console]", "hydra.run.dir=run"]
TWO = ["launch.nproc_per_node=2", "backend=gloo"]
SWEEP = ["-m", "model=mlp", "trainer.max_steps=1", "logger=[console]", "hydra.sweep.dir=sweep"]
COMMANDS = [
    (["--help"], 0, "trainer:"),
    (["--hydra-help"], 0, "--config-dir"),
    (["--version"], 0, "Hydra"),
    (["--cfg", "job", "--package=trainer"], 0, "max_steps: null"),
    (["--info", "defaults"], 0, "model/convnet"),
    (["--info", "plugins"], 0, "OptunaSweeper"),
    (SHORT, 0, "finished:"),
    ([*SHORT, "launch=fork", *TWO], 0, "finished:"),
    ([*SHORT, "launch=spawn", *TWO], 0, "finished:"),
    ([*SHORT, "launch=torchrun", *TWO], 0, "finished:"),
    ([*SHORT, "launch=slurm", "launch.dry_run=true"], 0, "#SBATCH"),
    ([*SWEEP, "optimizer=sgd,adamw"], 0, "sweep: 2 finished"),
    (["--optimizer.lr", "0.1"], 2, "unrecognized arguments: --optimizer.lr"),
    (["--config-name=nothing", "--config-dir=."], 2, "nothing is no config"),
]
STARTED_ANEW = (["--help"], ["--version"], SHORT)  # with the warnings of imports
ROWS = [
    pytest.param(*row, id=" ".join(row[0]), marks=[pytest.mark.new_process] if row[0] in STARTED_ANEW else [])
    for row in COMMANDS
]


@pytest.mark.parametrize(("words", "code", "said"), ROWS)
def test_a_command_answers(start, tmp_path, words, code, said):
    (tmp_path / "other.yaml").write_text("a: 1\n")
    run = start(sys.executable, TRAIN, *words).finish(code)
    assert said in run.output
    assert "Warning" not in run.output
    assert "Traceback" not in run.output
