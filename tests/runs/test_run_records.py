"""`run.json`: what a run was, over its starts, and how it ended."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.loggers.csv_logger import read_rows
from lockstep.runs.record import code_facts, versions
from support.commands import PYTHON_TRAIN, ROOT, Command, ema, wait_for
from support.digits import FEW
from support.event_files import Backend
from support.run_folders import SLOW, best_snapshot, position
from support.worlds import same_bits

SMALL = ["model=mlp", "model.width=16", "logger=[]", FEW, "trainer.batch_size=16"]


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def states(folder: Path) -> list[str]:
    """What `python src/runs.py table` shows in its column of states."""
    command = [sys.executable, ROOT / "src" / "runs.py", "table", folder, "--columns", "state"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1:]


def test_a_run_of_two_starts(tmp_path: Path) -> None:
    first = [*PYTHON_TRAIN, "launch=fork", *SMALL, "hydra.run.dir=run"]
    first += ["trainer.max_steps=30", "trainer.pause_after=1", "snapshot.every=10steps"]
    Command(first, tmp_path, OWN_TOKEN="kqzv").finish()
    before = record(tmp_path / "run")
    assert before["command"] == shlex.join(["python", *first[1:]])
    assert before["overrides"] == [word for word in first[2:] if not word.startswith("hydra")]
    assert before["config"]["trainer.max_steps"] == 30
    assert before["config"]["data_dir"] == "${oc.env:LOCKSTEP_DATA,data}"
    assert before["objective"]["name"] == "val/accuracy"
    assert before["environment"].items() >= versions().items()
    facts = code_facts()
    assert before["code"] == facts | {"modules": before["code"]["modules"]}
    assert "support.digits" in before["code"]["modules"]  # where the data set is from
    assert states(tmp_path) == ["paused"]
    shutil.rmtree(tmp_path / "run" / "snapshots" / "step_00000021")
    longer = [*PYTHON_TRAIN, *first[3:], "trainer.max_steps=40", "trainer.pause_after=null"]
    Command(longer, tmp_path).finish()
    after = record(tmp_path / "run")
    keys = ("from_step", "to_step", "world_size", "launcher", "state", "exit_code")
    assert [[life[key] for key in keys] for life in after["starts"]] == [
        [0, 20, 2, "fork", "paused", 0],
        [20, 40, 1, "python", "finished", 0],
    ]
    assert after["steps"] == 40
    assert after["config"]["trainer.max_steps"] == 40
    assert after["data"] == before["data"]
    assert states(tmp_path) == ["finished"]

    Command([*PYTHON_TRAIN, *first[3:], "seed=1"], tmp_path).finish(2)  # refused: another seed
    assert record(tmp_path / "run") == after
    assert "kqzv" not in (tmp_path / "run" / "run.json").read_text()


def test_the_same_config_is_written_in_the_same_way_in_any_folder_and_by_any_launcher(tmp_path: Path) -> None:
    options = [*SMALL[:2], "logger=[csv]", *SMALL[3:], "trainer.max_steps=2"]
    Command([*PYTHON_TRAIN, *options, "hydra.run.dir=one"], tmp_path).finish()
    Command([*PYTHON_TRAIN, *options, "launch=fork", "hydra.run.dir=two"], tmp_path).finish()
    one, two = record(tmp_path / "one"), record(tmp_path / "two")
    different = {key for key in one["config"] if one["config"][key] != two["config"].get(key)}
    assert {key.partition(".")[0] for key in different if not key.endswith("run_dir")} == {"launch"}
    (evaluated,) = [row[2] for row in read_rows(tmp_path / "one" / "metrics.csv") if row[1] == "val/accuracy"]
    assert one["objective"] == {
        "name": "val/accuracy",
        "mode": "max",
        "best": None,  # the same run with more steps would not have evaluated here
        "step": None,
        "last": evaluated,
    }


def test_a_record_names_the_chosen_classes_and_only_what_they_take(tmp_path: Path) -> None:
    """So do the HParams table and `runs.py table`. The best evaluation is that of the snapshot: the last one, in
    mid-epoch, is none that the same run with more steps would have.
    """
    net = "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    (tmp_path / "nets.py").write_text(f"from torch import nn\n{net}")
    words = ["model._target_=nets.net", "optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.05"]
    words += ["trainer.epochs=2", "trainer.max_steps=30", "hydra.run.dir=run"]
    Command([*PYTHON_TRAIN, *words], tmp_path, PYTHONPATH=".").finish()
    run = record(tmp_path / "run")
    assert (run["options"]["model"], run["options"]["optimizer"]) == ("nets.net", "torch.optim.Adagrad")
    assert (run["options"]["dataset"], run["options"]["task"]) == ("digits", "classification")
    assert {"optimizer.lr", "optimizer.momentum"} & run["config"].keys() == {"optimizer.lr"}
    best = best_snapshot(tmp_path / "run")["progress"]
    assert (run["objective"]["best"], run["objective"]["step"]) == (best["best"], best["step"])
    assert run["objective"]["step"] == 21 < run["steps"]
    (row,) = Backend(tmp_path).rows().values()
    columns = row.hyperparameters
    assert (columns["model"], columns["optimizer"]) == ("nets.net", "torch.optim.Adagrad")
    assert not {"optimizer.momentum", "optimizer.nesterov", "backend"} & columns.keys()
    command = [sys.executable, ROOT / "src" / "runs.py", "table", tmp_path, "--filter", "optimizer=torch.optim.Adagrad"]
    assert "run  finished" in subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout


@pytest.mark.parametrize(("number", "state"), [(signal.SIGKILL, "killed"), (signal.SIGTERM, "stopped")])
def test_how_an_interrupted_run_ended(start: Callable[..., Command], number: int, state: str) -> None:
    words = [*SLOW, "trainer.epochs=200", "logger=[]", "hydra.run.dir=run"]
    run = start(*PYTHON_TRAIN, *words, "optimizer.lr=0.1", ema(0.9))
    folder = run.cwd / "run"
    wait_for(lambda: position(folder)[0] >= 5, "snapshot")
    assert states(run.cwd) == ["running"]
    os.kill(run.process.pid, number)
    run.finish(None)
    wait_for(lambda: states(run.cwd) == [state], f"state {state}")
    fewer = start(*PYTHON_TRAIN, *words, ema(0.5)).finish(2)  # the default would replace the learning rate
    told = "holds a run with optimizer.lr=0.1, and here it is 0.05; type optimizer.lr=0.1 to go on with it"
    assert told in fewer.sentence


def test_a_resumed_run_keeps_how_its_first_start_ended(tmp_path: Path) -> None:
    """Another rank was killed: rank 0 saw an error of gloo, and the report knows better."""
    words = [*SMALL, "model._target_=support.faults.FaultyModel", "launch=fork", "hydra.run.dir=run"]
    words += ["trainer.max_steps=30", "snapshot.every=5steps"]
    faulty = {"PYTHONPATH": ROOT / "tests", "FAULT": "forward/kill:1:14"}
    Command([*PYTHON_TRAIN, *words], tmp_path, **faulty).finish(1)
    assert states(tmp_path) == ["killed"]
    Command([*PYTHON_TRAIN, *words, "trainer.max_steps=40"], tmp_path, **faulty | {"FAULT": "none/none:0:0"}).finish()
    first, second = record(tmp_path / "run")["starts"]
    assert (first["state"], first["exit_code"], first["config"]) == ("killed", 1, {"trainer.max_steps": 30})
    assert (second["state"], second["exit_code"]) == ("finished", 0)


def test_a_run_is_repeated_from_its_record(tmp_path: Path) -> None:
    first = [*PYTHON_TRAIN, *SMALL, "trainer.max_steps=3", "hydra.run.dir=one"]
    Command(first, tmp_path).finish()
    again = [*PYTHON_TRAIN, f"--config-path={tmp_path}/one/.hydra", "hydra.run.dir=two"]
    Command(again, tmp_path).finish()
    assert record(tmp_path / "two")["config"]["trainer.max_steps"] == 3
    assert same_bits(tmp_path / "one", tmp_path / "two")
