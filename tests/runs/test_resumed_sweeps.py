"""What a second command does in the folder of a sweep: the values it adds, and the jobs of the commands before it."""

import os
import re
import shlex

import pytest

from support.commands import PYTHON_TRAIN
from support.sweep_tables import column, rows_of

SHORT = ["model=linear", "trainer.max_steps=2"]


def test_a_search_that_goes_on_with_one_value_of_a_key_trains_with_it(start):
    drawn = ["sweep.search=random", "sweep.trials=2", "optimizer.lr=interval(0.01,0.1)", "trainer.batch_size=32,16"]
    start(*PYTHON_TRAIN, "-m", *SHORT, "sweep.trials=9", *drawn, "hydra.sweep.dir=s").finish()
    drawn = [*drawn[:-1], "trainer.batch_size=32", "sweep.trials=4"]
    run = start(*PYTHON_TRAIN, "-m", *SHORT, *drawn, "hydra.sweep.dir=s").finish()
    added = rows_of(run.cwd / "s")[2:]
    assert len(added) >= 2
    for row in added:
        assert row["overrides"].endswith(" trainer.batch_size=32")
        assert "batch_size: 32\n" in (run.cwd / "s" / row["folder"] / ".hydra" / "config.yaml").read_text()


def test_a_command_that_is_typed_again_runs_what_it_has_left(start):
    """A job of the first command waits; the second one lists other values, in a folder with any name."""
    command = [*PYTHON_TRAIN, *SHORT, "-m", "hydra.sweep.dir='a=1 ü'"]
    table = start(*command, "optimizer.lr=0.1,0.2").finish().cwd / "a=1 ü" / "sweep.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:2], lines[2].replace("finished", "waiting")]))
    start(*command, "seed=1,2").finish(75)
    assert column(table.parent, "state") == ["finished", "waiting", "finished", "finished"]
    more = start(*command, "optimizer.lr=0.1,0.2").finish()
    assert "sweep: job 1, optimizer.lr=0.2\n" in more.output
    assert column(table.parent, "state") == ["finished"] * 4


def test_a_refused_command_does_not_change_what_the_sweep_is(start):
    command = [*PYTHON_TRAIN, *SHORT, "-m", "hydra.sweep.dir=s"]
    start(*command, "seed=1,2", "sweep.slots=1000").finish(2)
    folder = start(*command, "seed=1,2", "optimizer.lr=0.2").finish().cwd / "s"  # nothing was trained with another lr
    record = (folder / "sweep.json").read_text()
    refused = start(*command, "seed=1,2,3", "optimizer.lr=0.2", "sweep.slots=1000").finish(2)
    assert "sweep.slots=1000 is more than the" in refused.sentence
    assert (folder / "sweep.json").read_text() == record
    killed = folder.with_name("t")  # before it had rows
    killed.mkdir()
    (killed / "sweep.json").write_text(record)
    start(*command, "seed=1,2", "optimizer.lr=0.1", "hydra.sweep.dir=t").finish()


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_job_that_slurm_has_is_not_submitted_again(start, tmp_path, state):
    """The sweep ended when sbatch had taken the job and the row did not say so yet."""
    command = [*PYTHON_TRAIN, *SHORT, "-m", "hydra.sweep.dir=s", "seed=1,2"]
    table = start(*command).finish().cwd / "s" / "sweep.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:2], lines[2].replace("finished", state)]))
    (table.parent / "1_seed=2" / "slurm_job").write_text("17\n")
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho 17\n")
    squeue.chmod(0o755)
    run = start(*command, PATH=f"{squeue.parent}:{os.environ['PATH']}").finish()
    assert "sweep: job" not in run.output
    assert column(table.parent, "state") == ["finished", "running"]
    assert column(table.parent, "cause") == ["", "submitted, and runs elsewhere"]


@pytest.mark.parametrize("launch", ["env", "fork"])
def test_a_job_whose_folder_cannot_be_written_is_not_refused_for_ever(start, tmp_path, launch):
    command = [*PYTHON_TRAIN, *SHORT, "-m", "hydra.sweep.dir=s", "seed=1,2", f"launch={launch}"]
    logs = tmp_path / "s" / "1_seed=2" / "logs"
    logs.parent.mkdir(parents=True)
    logs.write_text("a file where a folder should be")
    run = start(*command).finish(1)
    assert column(tmp_path / "s", "cause")[1].startswith(
        f"the run folder {logs.parent} cannot be written (File exists)"
    )
    assert "run what failed again: " in run.output
    logs.unlink()
    start(*command, "sweep.retry=failed").finish()


def test_the_command_that_goes_on_names_a_class_and_a_folder_of_configs_of_the_users(start, tmp_path):
    (tmp_path / "conf").mkdir()
    net = "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    (tmp_path / "nets.py").write_text(f"from torch import nn\n{net}")
    words = ["model._target_=nets.net", "--config-dir=conf", "trainer.max_steps=2", "hydra.sweep.dir=s"]
    logs = tmp_path / "s" / "1_seed=2" / "logs"
    logs.parent.mkdir(parents=True)
    logs.write_text("a file where a folder should be")
    run = start(*PYTHON_TRAIN, "-m", *words, "seed=1,2", PYTHONPATH=".").finish(1)
    logs.unlink()
    (typed,) = re.findall(r"^run what failed again: .* (-m .*)\n", run.output, re.MULTILINE)
    start(*PYTHON_TRAIN, *shlex.split(typed), PYTHONPATH=".").finish()
    assert column(tmp_path / "s", "state") == ["finished"] * 2
