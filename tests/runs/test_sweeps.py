"""Sweeps: the table, what is refused before the first job, and what a second command in the same folder runs.

Sweeps by each launcher are in test_starters.py. Sweeps that are killed, and several jobs at once, are drills.
"""

import fcntl
import json
import re
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, TRAIN
from support.run_folders import best_snapshot
from support.sweep_tables import column, rows_of

SHORT = ["model=linear", "trainer.max_steps=2"]


def test_a_sweep_with_a_wrong_value_is_refused_before_its_first_job(start):
    run = start(*PYTHON_TRAIN, *SHORT, "-m", "optimizer.lr=0.1,-1,0.01", "hydra.sweep.dir=s").finish(2)
    assert run.sentence.startswith("lockstep: the job optimizer.lr=-1: torch.optim.SGD refuses its arguments (")
    assert not (run.cwd / "s").exists()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ["launch=torchrun", "gradient_sync=ring,powersgd", "strategy=ddp,fsdp"],
            "the job gradient_sync=ring strategy=fsdp: gradient_sync=",
        ),
        (
            ["model=mlp", "+model.depht=1,2"],
            "the job +model.depht=1: lockstep.models.tutorial.mlp takes no depht; type ~model.depht",
        ),
        (["model=mlp", "mode=train,check"], "mode=check is no training, and a sweep trains; type"),
    ],
    ids=["strategy", "argument", "mode"],
)
def test_what_only_a_job_s_own_checks_refuse_is_refused_before_the_first_job(start, typed, said):
    run = start(*PYTHON_TRAIN, "trainer.max_steps=2", "-m", *typed, "hydra.sweep.dir=s").finish(2)
    assert said in run.sentence
    assert "; type " in run.sentence or "; leave " in run.sentence
    assert "sweep: job" not in run.output
    assert not (run.cwd / "s").exists()


def test_a_drawn_combination_that_is_refused_costs_its_own_job_only(start):
    drawn = ["sweep.search=random", "trainer.batch_size=32,64", "trainer.gradient_accumulation_steps=1,64"]
    words = [*PYTHON_TRAIN, "-m", "model=mlp", "logger=[]", "trainer.max_steps=1", *drawn]
    run = start(*words, "sweep.trials=2", "hydra.sweep.dir=s").finish(1)
    assert column(run.cwd / "s", "state") == ["failed", "finished"]
    sentence = "refused: trainer.batch_size=32 is too small for 64 micro-batches; type trainer.batch_size=64 or more"
    assert column(run.cwd / "s", "cause") == [sentence, ""]
    assert sentence in run.output
    assert "run what failed again" not in run.output
    run = start(*words, "sweep.trials=1", "hydra.sweep.dir=t").finish(2)  # all of them are refused
    assert sentence.removeprefix("refused: ") in run.sentence
    assert not (run.cwd / "t").exists()


def test_the_table_of_a_sweep_and_a_second_command_in_its_folder(start):
    """Job 1 diverges. Then: nothing is run twice, new values get new numbers, another config is refused."""
    command = [*PYTHON_TRAIN, "model=mlp", "trainer.epochs=1", "-m", "hydra.sweep.dir=s"]
    run = start(*command, "optimizer.lr=0.1,1e10,0.02").finish(1)
    folder = run.cwd / "s"
    assert column(folder, "state") == ["finished", "failed", "finished"]
    assert column(folder, "overrides") == ["optimizer.lr=0.1", "optimizer.lr=10000000000.0", "optimizer.lr=0.02"]
    check_run(folder / "0_optimizer.lr=0.1", run.output, rows_of(folder)[0])
    assert "the loss is" in rows_of(folder)[1]["cause"]
    check_summary(run.output)
    check_one_after_the_other(folder)
    check_changes_are_refused(start, command, folder)

    first = rows_of(folder)
    more = start(*command, "optimizer.lr=0.05,0.1,0.02").finish(1)
    assert re.findall(r"^sweep: job (\d+),", more.output, re.MULTILINE) == ["3"]
    assert rows_of(folder)[:3] == first
    assert rows_of(folder)[3]["state"] == "finished"
    assert (folder / "3_optimizer.lr=0.05" / "model.pt").exists()

    retried = start(*command, "optimizer.lr=1e10", "sweep.retry=failed").finish(1)
    assert re.findall(r"^sweep: job (\d+),", retried.output, re.MULTILINE) == ["1"]


def check_one_after_the_other(folder: Path) -> None:
    """The next job is ready while one trains, and waits for its turn."""
    lives = [json.loads((folder / row["folder"] / "run.json").read_text())["lives"] for row in rows_of(folder)]
    times = [moment for (life,) in lives for moment in (life["started"], life["ended"])]
    assert times == sorted(times)


def check_run(folder: Path, output: str, row: dict[str, str]) -> None:
    """The row has the run's own numbers."""
    (accuracy,) = re.findall(
        r"^finished: .* accuracy ([\d.]+)\ntest: .*\nrun folder: \S+/0_optimizer", output, re.MULTILINE
    )
    assert float(row["objective"]) == pytest.approx(float(accuracy), abs=5e-5)
    best = best_snapshot(folder)["progress"]
    assert (float(row["best"]), int(row["best_step"])) == (best["best"], best["step"])
    assert float(row["seconds"]) > 0
    assert "optimizer.lr=0.1" in (folder / ".hydra" / "overrides.yaml").read_text()


def check_summary(output: str) -> None:
    """The best accuracy comes first, the failure last with its cause, then what to type."""
    summary = output[output.index("sweep: 2 finished, 1 failed") :]
    assert re.findall(r"^ +(\d) +(\w+)", summary, re.MULTILINE) == [
        ("0", "finished"),
        ("2", "finished"),
        ("1", "failed"),
    ]
    assert "the loss is" in summary
    assert "train.py model=mlp trainer.epochs=1 optimizer.lr=0.1\n" in summary
    again = "-m model=mlp trainer.epochs=1 optimizer.lr=0.1,1e10,0.02 hydra.sweep.dir=s sweep.retry=failed"
    assert f"run what failed again: python {TRAIN} {again}\n" in summary


def check_changes_are_refused(start, command: list[str], folder: Path) -> None:
    other = start(*command, "optimizer.lr=0.1", "trainer.epochs=2").finish(2)
    assert "begun with another config or other code: trainer.epochs (1 then, 2 now); type" in other.sentence
    record = folder / "sweep.json"
    before = record.read_text()
    contents = json.loads(before)
    contents["code"]["src/train.py"] = "0"
    record.write_text(json.dumps(contents))
    other = start(*command, "optimizer.lr=0.1").finish(2)
    assert "the code of src/train.py; type hydra.sweep.dir=<another folder>, or sweep.changes=accept" in other.sentence
    record.write_text(before)


def test_a_module_of_the_user_s_that_was_edited_is_refused(start, tmp_path):
    """Also one that the model's module imports."""
    (tmp_path / "nets.py").write_text("import parts\ndef net(shape, classes):\n    return parts.flat(64, classes)\n")
    parts = tmp_path / "parts.py"
    parts.write_text("from torch import nn\ndef flat(n, m):\n    return nn.Sequential(nn.Flatten(), nn.Linear(n, m))\n")
    command = [*PYTHON_TRAIN, "-m", "model=linear", "model._target_=nets.net", "trainer.max_steps=2"]
    command += ["hydra.sweep.dir=s"]
    start(*command, "seed=1,2", PYTHONPATH=tmp_path).finish()
    parts.write_text(parts.read_text() + "# edited\n")
    run = start(*command, "seed=1,2,3", PYTHONPATH=tmp_path).finish(2)
    assert "the code of parts; type hydra.sweep.dir=<another folder>, or sweep.changes=accept" in run.sentence
    start(*command, "seed=1,2,3", "sweep.changes=accept", PYTHONPATH=tmp_path).finish()
    start(*command, "seed=1,2,3,4", PYTHONPATH=tmp_path).finish()


def test_rows_of_an_earlier_command_that_wait_are_no_success(start):
    command = [*PYTHON_TRAIN, *SHORT, "-m", "hydra.sweep.dir=s"]
    table = start(*command, "seed=1,2").finish().cwd / "s" / "sweep.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:2], lines[2].replace("finished", "waiting")]))
    more = start(*command, "seed=1").finish(75)
    assert column(table.parent, "state") == ["finished", "waiting"]
    assert "go on with: " in more.output


def test_folders_that_no_sweep_can_use_are_refused(start, tmp_path):
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    run = start(*PYTHON_TRAIN, "-m", "hydra.sweep.dir=run", "seed=1,2").finish(2)
    assert run.sentence.endswith("run is the folder of a run, not of a sweep; type hydra.sweep.dir=<another folder>")
    (tmp_path / "s").mkdir()
    with open(tmp_path / "s" / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # as a sweep that runs holds it
        run = start(*PYTHON_TRAIN, "-m", "hydra.sweep.dir=s", "seed=1,2").finish(2)
    assert "another sweep holds s (" in run.sentence
    assert "wait for its end, or type hydra.sweep.dir=" in run.sentence


def test_a_sweep_inside_the_ranks_of_a_launcher_is_refused(start):
    run = start(*PYTHON_TRAIN, "-m", "seed=1,2", RANK=0, WORLD_SIZE=2).finish(2)
    assert run.sentence.endswith("type python src/train.py -m launch=torchrun and the same overrides")
