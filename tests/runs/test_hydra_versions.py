"""Thirty commands that go through Hydra, with whatever Hydra is installed. `.ci/hydra` runs them with the next one."""

import sys

import pytest

from support.commands import TRAIN

SHORT = ["model=mlp", "trainer.max_steps=1", "logger=[console]", "hydra.run.dir=run"]
TWO = ["launch.nproc_per_node=2", "backend=gloo"]
SWEEP = ["-m", "model=mlp", "trainer.max_steps=1", "logger=[console]", "hydra.sweep.dir=sweep"]
OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2"]
COMMANDS = [
    (["--help"], 0, "trainer:"),
    (["--help", "model=mlp"], 0, "trainer:"),
    (["--help", "--config-dir=."], 0, "trainer:"),
    (["--hydra-help"], 0, "--config-dir"),
    (["--version"], 0, "Hydra"),
    (["--cfg", "job"], 0, "trainer:"),
    (["--cfg", "hydra"], 0, "runtime:"),
    (["--cfg", "job", "--package=trainer"], 0, "max_steps: null"),
    (["--info", "defaults"], 0, "model/convnet"),
    (["--info", "plugins"], 0, "OptunaSweeper"),
    (SHORT, 0, "finished:"),
    ([*SHORT, "launch=fork", *TWO], 0, "finished:"),
    ([*SHORT, "launch=spawn", *TWO], 0, "finished:"),
    ([*SHORT, "launch=torchrun", *TWO], 0, "finished:"),
    ([*SHORT, "launch=slurm", "launch.dry_run=true"], 0, "#SBATCH"),
    ([*SHORT, "+model.nothing=1"], 2, "takes no nothing; type ~model.nothing"),
    ([*SWEEP, "seed=1,2"], 0, "sweep: 2 finished"),
    ([*SWEEP, "optimizer=sgd,adamw"], 0, "sweep: 2 finished"),
    ([*SWEEP, "seed=1", "optimizer.lr=high,0.1"], 2, "optimizer.lr"),
    ([*SWEEP, *OPTUNA, "optimizer.lr=interval(0.01,0.1)"], 0, "sweep: 2 finished"),
    (["seed=1,2"], 2, "seed=1,2 cannot be composed; type the command without seed=1,2"),
    (["optimizer.lrr=1"], 2, "optimizer.lrr is no key of this config; type optimizer.lr=1"),
    (["+optimizer.lr=1"], 2, "type the command without +optimizer.lr=1"),
    (["~optimizer.lrr"], 2, "lockstep: ~optimizer.lrr cannot be composed"),
    (["model=mlpp"], 2, "type model=mlp,"),
    (["optimizer.lr=("], 2, "optimizer.lr=( cannot be composed; type"),
    (["trainer.epochs=many"], 2, "trainer.epochs=many should be a valid integer; type trainer.epochs=<value>"),
    (["optimizer.lr", "=", "0.1"], 2, "optimizer.lr cannot be composed; type the command without"),
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


def test_a_run_goes_on_and_is_evaluated(start):
    words = [sys.executable, TRAIN, "model=mlp", "hydra.run.dir=run", "trainer.epochs=2"]
    start(*words, "trainer.pause_after=1").finish()
    assert "finished:" in start(*words).finish().output
    assert "accuracy" in start(sys.executable, TRAIN, "mode=evaluate", "resume=run").finish().output
