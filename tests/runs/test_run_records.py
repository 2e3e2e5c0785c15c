"""`run.json`: what a run was, over its starts, and how it ended."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from lockstep.runs.record import code_facts, versions
from support.commands import PYTHON_TRAIN, ROOT, ema, wait_for
from support.digits import FEW
from support.event_files import Backend
from support.logged import read_rows
from support.run_folders import SLOW, best_snapshot, position
from support.worlds import same_bits

SMALL = ["model=mlp", "model.width=16", FEW, "trainer.batch_size=16"]
RUN = [*PYTHON_TRAIN, *SMALL, "logger=[]", "hydra.run.dir=run"]


def record(folder):
    return json.loads((folder / "run.json").read_text())


def states(folder, *words):
    """What `python src/runs.py table` shows in its column of states."""
    command = [sys.executable, ROOT / "src" / "runs.py", "table", folder, "--columns", "state", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1:]


def test_a_run_of_two_starts(start, tmp_path):
    first = [*RUN, "trainer.max_steps=30", "trainer.pause_after=1", "snapshot.every=10steps"]
    typed = [*first, "launch=fork"]
    start(*typed, OWN_TOKEN="kqzv").finish()
    before = record(tmp_path / "run")
    assert before["command"] == shlex.join(["python", *typed[1:]])
    assert before["overrides"] == [word for word in typed[2:] if not word.startswith("hydra")]
    assert before["config"]["trainer.max_steps"] == 30
    assert before["config"]["data_dir"] == "${oc.env:LOCKSTEP_DATA,data}"
    assert before["objective"]["name"] == "val/accuracy"
    assert before["environment"].items() >= versions().items()
    assert before["code"] == code_facts() | {"modules": before["code"]["modules"]}
    assert "support.digits" in before["code"]["modules"]  # where the data set is from
    assert states(tmp_path) == ["paused"]
    shutil.rmtree(tmp_path / "run" / "snapshots" / "step_00000021")
    start(*first, "trainer.max_steps=40", "trainer.pause_after=null").finish()
    after = record(tmp_path / "run")
    keys = ("from_step", "to_step", "world_size", "launcher", "state", "exit_code")
    assert [[life[key] for key in keys] for life in after["starts"]] == [
        [0, 20, 2, "fork", "paused", 0],
        [20, 40, 1, "python", "finished", 0],
    ]
    assert (after["steps"], after["config"]["trainer.max_steps"], after["data"]) == (40, 40, before["data"])
    assert states(tmp_path) == ["finished"]
    start(*first, "seed=1").finish(2)  # refused: another seed
    assert record(tmp_path / "run") == after
    assert "kqzv" not in (tmp_path / "run" / "run.json").read_text()


def test_the_same_config_is_written_in_the_same_way_by_any_launcher_and_repeats_the_run(start, tmp_path):
    words = [*PYTHON_TRAIN, *SMALL, "logger=[csv]", "trainer.max_steps=2"]
    start(*words, "hydra.run.dir=one").finish()
    start(*words, "launch=fork", "hydra.run.dir=two").finish()
    one, two = record(tmp_path / "one"), record(tmp_path / "two")
    different = {key for key in one["config"] if one["config"][key] != two["config"].get(key)}
    assert {key.partition(".")[0] for key in different if not key.endswith("run_dir")} == {"launch"}
    (evaluated,) = [value for _, tag, value in read_rows(tmp_path / "one") if tag == "val/accuracy"]
    # The same run with more steps would not have evaluated here.
    nothing = {"best": None, "step": None}
    assert one["objective"] == {"name": "val/accuracy", "mode": "max", "last": evaluated} | nothing
    start(*PYTHON_TRAIN, f"--config-path={tmp_path}/one/.hydra", "hydra.run.dir=again").finish()
    assert record(tmp_path / "again")["config"]["trainer.max_steps"] == 2
    assert same_bits(tmp_path / "one", tmp_path / "again")


def test_a_record_names_the_chosen_classes_and_only_what_they_take(start, tmp_path):
    """So do the HParams table and `runs.py table`. The best evaluation is that of the snapshot: the last one, in
    mid-epoch, is none that the same run with more steps would have.
    """
    net = "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    (tmp_path / "nets.py").write_text(f"from torch import nn\n{net}")
    words = ["model._target_=nets.net", "optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.05"]
    words += ["trainer.epochs=2", "trainer.max_steps=30", "hydra.run.dir=run"]
    start(*PYTHON_TRAIN, *words, PYTHONPATH=".").finish()
    run, best = record(tmp_path / "run"), best_snapshot(tmp_path / "run")["progress"]
    names = {"model": "nets.net", "optimizer": "torch.optim.Adagrad"}
    assert run["options"].items() >= (names | {"dataset": "digits", "task": "classification"}).items()
    assert {"optimizer.lr", "optimizer.momentum"} & run["config"].keys() == {"optimizer.lr"}
    assert (run["objective"]["best"], run["objective"]["step"]) == (best["best"], best["step"])
    assert run["objective"]["step"] == 21 < run["steps"]
    (row,) = Backend(tmp_path).rows().values()
    assert row.hyperparameters.items() >= names.items()
    assert not {"optimizer.momentum", "optimizer.nesterov", "backend"} & row.hyperparameters.keys()
    assert states(tmp_path, "--filter", "optimizer=torch.optim.Adagrad") == ["finished"]


@pytest.mark.parametrize(("number", "state"), [(signal.SIGKILL, "killed"), (signal.SIGTERM, "stopped")])
def test_how_an_interrupted_run_ended(start, number, state):
    words = [*SLOW, "trainer.epochs=200", "logger=[]", "hydra.run.dir=run"]
    run = start(*PYTHON_TRAIN, *words, "optimizer.lr=0.1", ema(0.9))
    wait_for(lambda: position(run.cwd / "run")[0] >= 5, "snapshot")
    assert states(run.cwd) == ["running"]
    os.kill(run.process.pid, number)
    run.finish(None)
    wait_for(lambda: states(run.cwd) == [state], f"state {state}")
    fewer = start(*PYTHON_TRAIN, *words, ema(0.5)).finish(2)  # the default would replace the learning rate
    told = "holds a run with optimizer.lr=0.1, and here it is 0.05; type optimizer.lr=0.1 to go on with it"
    assert told in fewer.sentence


def test_a_resumed_run_keeps_how_its_first_start_ended(start, tmp_path):
    """Another rank was killed: rank 0 saw an error of gloo, and the report knows better."""
    words = [*RUN, "model._target_=support.faults.FaultyModel", "launch=fork", "snapshot.every=5steps"]
    start(*words, "trainer.max_steps=30", FAULT="forward/kill:1:14").finish(1)
    assert states(tmp_path) == ["killed"]
    start(*words, "trainer.max_steps=40", FAULT="none/none:0:0").finish()
    first, second = record(tmp_path / "run")["starts"]
    assert (first["state"], first["exit_code"], first["config"]) == ("killed", 1, {"trainer.max_steps": 30})
    assert (second["state"], second["exit_code"]) == ("finished", 0)
