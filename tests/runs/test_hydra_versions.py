"""Thirty commands that go through Hydra, with whatever Hydra is installed. `.ci/hydra` runs them with the next one."""

import re
import sys

import pytest

from support.commands import TORCHRUN, TRAIN

SHORT = ["model=mlp", "trainer.max_steps=1", "logger=[console]", "hydra.run.dir=run"]
TWO = ["launch.nproc_per_node=2", "backend=gloo"]
SWEEP = ["-m", "model=mlp", "trainer.max_steps=1", "logger=[console]", "hydra.sweep.dir=sweep"]
OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2"]
QUESTIONS = [
    ("--help", "torchrun --standalone --nproc_per_node=2 src/train.py"),
    ("--help model=mlp", "trainer:"),
    ("--help --config-dir=conf", "trainer:"),
    ("--hydra-help", "--experimental-rerun"),
    ("--version", "Hydra 1."),
    ("--cfg job", "gradient_accumulation_steps: 1"),
    ("--cfg hydra", "runtime:"),
    ("--cfg job --package=trainer", "max_steps: null"),
    ("--info defaults", "scheduler/cosine"),
    ("--info plugins", "OptunaSweeper"),
]
COMMANDS = [
    (SHORT, 0, "finished:"),
    ([*SHORT, "launch=fork", *TWO], 0, "finished:"),
    ([*SHORT, "launch=spawn", *TWO], 0, "finished:"),
    ([*SHORT, "launch=torchrun", *TWO], 0, "finished:"),
    ([*SHORT, "launch=slurm", "launch.dry_run=true"], 0, "#SBATCH"),
    ([*SHORT, "+model.nothing=1"], 2, "takes no nothing; type ~model.nothing"),
    ([*SWEEP, "optimizer=sgd,adamw"], 0, "sweep: 2 finished"),
    ([*SWEEP, "seed=1", "optimizer.lr=high,0.1"], 2, "optimizer.lr"),
    ([*SWEEP, *OPTUNA, "optimizer.lr=interval(0.01,0.1)"], 0, "sweep: 2 finished"),
    (["seed=1,2"], 2, "seed=1,2 cannot be composed; type the command without seed=1,2"),
    (["optimizer.lrr=1"], 2, "optimizer.lrr is no key of this config; type optimizer.lr=1"),
    (["dataset=pair", "dataset.train={_target_: a.B, n: 1}"], 2, "type '+dataset.train={_target_: a.B, n: 1}'"),
    (["task.loss._target_=a.B"], 2, "task.loss._target_ is a new key; type +task.loss._target_=a.B"),
    (["+optimizer.lr=1"], 2, "type the command without +optimizer.lr=1"),
    (["optimizer=adamw", "+optimizer.lr=1"], 2, "type the command without +optimizer.lr=1"),
    (["~optimizer.lrr"], 2, "lockstep: ~optimizer.lrr cannot be composed"),
    (["model=mlpp"], 2, "type model=mlp,"),
    (["optimizer.lr=("], 2, "optimizer.lr=( cannot be composed; type"),
    (["trainer.epochs=many"], 2, "trainer.epochs=many should be a valid integer; type trainer.epochs=<value>"),
    (["optimizer.lr", "=", "0.1"], 2, "optimizer.lr cannot be composed; type the command without"),
    (["--optimizer.lr", "0.1"], 2, "unrecognized arguments: --optimizer.lr"),
    (["--config-name=nothing", "--config-dir=."], 2, "nothing is no config"),
]
# A command that is started anew has the warnings of imports, too.
ROWS = [pytest.param(*row, marks=[pytest.mark.new_process] if row[0] == SHORT else []) for row in COMMANDS]


@pytest.mark.parametrize(("words", "code", "said"), ROWS, ids=str)
def test_a_command_answers(start, words, code, said):
    run = start(sys.executable, TRAIN, *words).finish(code)
    assert said in run.output
    assert "Warning" not in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(("question", "answered"), QUESTIONS)
def test_a_question_is_answered_without_torch_and_leaves_nothing(start, tmp_path, question, answered):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "other.yaml").write_text("a: 1\n")
    run = start(sys.executable, "-X", "importtime", TRAIN, *question.split()).finish()
    assert answered in run.output
    assert "Warning" not in run.output
    assert not re.search(r"\|\s+torch(vision|\.\w+)*$", run.output, re.MULTILINE)
    assert [path.name for path in tmp_path.rglob("*")] == ["conf", "other.yaml"]


def test_two_ranks_of_torchrun_answer_once_and_help_that_nobody_reads_to_its_end_is_no_error(start):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, "--help").finish()
    assert f"\n{run.output}".count("\nLockstep: ") == 1
    cut = start("bash", "-c", f"set -o pipefail; {sys.executable} {TRAIN} --help | head -1").finish()
    assert cut.output.count("\n") == 1
    assert not list(run.cwd.iterdir())


def test_a_run_goes_on_and_is_evaluated(start):
    words = [sys.executable, TRAIN, "model=mlp", "hydra.run.dir=run", "trainer.epochs=2"]
    start(*words, "trainer.pause_after=1").finish()
    assert "finished:" in start(*words).finish().output
    assert "accuracy" in start(sys.executable, TRAIN, "mode=evaluate", "resume=run").finish().output
