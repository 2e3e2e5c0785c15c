"""Runs that are typed again: their folder, curves, snapshots, time, and `run.json`, which says what a run was."""

import os
import shlex
import shutil
import signal
import subprocess

import pytest

from lockstep.runs.record import code_facts, read_run, state_of, versions
from lockstep.snapshots.files import list_snapshots, step_of
from support.commands import ON_TEST, PYTHON_TRAIN, WHOLE, ema, wait_for
from support.digits import FEW
from support.event_files import Backend, scalars
from support.faults import MODEL
from support.logged import read_rows
from support.run_folders import SLOW, best_snapshot, newest_snapshot, position, read_log
from support.worlds import same_bits

SMALL = ["model=mlp", "model.width=16", FEW, "trainer.batch_size=16"]
RUN = [*PYTHON_TRAIN, *SMALL, "logger=[]", "hydra.run.dir=run"]


def steps_of_snapshots(folder):
    return [step_of(path) for path in reversed(list_snapshots(folder / "snapshots"))]


def test_the_same_folder_goes_on_by_itself_with_the_same_split_and_one_curve(train, tmp_path):
    constant, same, whole = ["scheduler=constant", "model=mlp"], tmp_path / "same", tmp_path / "whole"
    train(*constant, "trainer.epochs=3", "hydra.run.dir=whole")
    train(*constant, "trainer.max_steps=33", "hydra.run.dir=same")  # in the middle of the second epoch
    for word in ("loader.split_seed=1", "loader.validation=null"):  # another split
        refused = train(*constant, "hydra.run.dir=same", word, code=2).sentence
        assert f"holds a run with {word.split('=')[0]}=" in refused
    refused = train(*constant, "hydra.run.dir=other", "resume=same", "loader.validation=null", code=2).sentence
    assert "does not fit this run: " in refused
    assert "validation data (" in refused
    run = train(*constant, "trainer.epochs=3", "hydra.run.dir=same")
    assert "resumed from" in run.output
    assert len(run.epochs) == 2
    assert same_bits(whole, same)
    one, other = read_run(whole), read_run(same)
    assert [one[key] for key in ("data", "test", "objective")] == [other[key] for key in ("data", "test", "objective")]
    curves, expected = scalars(same), scalars(whole)
    assert [step for step, _ in curves["train/lr"]] == [10, 20, 30, 40, 50, 60]
    # The losses of the second epoch, and of these ten steps, count the steps before the stop, too.
    assert dict(curves["train/loss"])[42] == dict(expected["train/loss"])[42]
    assert dict(curves["train/running_loss"])[40] == dict(expected["train/running_loss"])[40]
    assert sorted(path.name for path in (same / ".hydra").iterdir()) == ["config.yaml", "overrides.yaml"]
    assert "max_steps: null" in (same / ".hydra" / "config.yaml").read_text()


def test_how_often_a_run_saves_and_how_much_it_keeps_beside_damaged_ones(train, tmp_path):
    run, snapshots = tmp_path / "run", tmp_path / "run" / "snapshots"
    words = [*WHOLE[1:], "model=mlp", "hydra.run.dir=run", ON_TEST, "trainer.epochs=2", "logging.every=7"]
    train(*words, "snapshot.every=10steps", "snapshot.keep_last=9", "trainer.max_steps=30")
    assert steps_of_snapshots(run) == [10, 20, 30]
    shutil.copytree(list_snapshots(snapshots, "best")[0], snapshots / "best_00000099")  # of steps trained again
    for path in list_snapshots(snapshots)[:2]:
        (path / "state.pt").write_bytes(b"damaged")
    resumed = train(*words, "snapshot.every=15steps", "snapshot.keep_last=3")
    assert "step_00000020 is damaged" in resumed.output
    assert steps_of_snapshots(run) == [30, 45, 46]
    assert (snapshots / "step_00000020.damaged").is_dir()
    assert step_of(list_snapshots(snapshots, "best")[0]) == newest_snapshot(run)["progress"]["best_step"]
    assert [step for step, _ in scalars(run)["train/lr"]] == [7, 14, 21, 28, 35, 42]
    for path in list_snapshots(snapshots):
        (path / "state.pt").write_bytes(b"damaged")
    sentence = train(*words, code=2).sentence
    assert "type another one, such as a best one, and to go on hydra.run.dir=<a new folder>" in sentence
    more = ["trainer.epochs=3", "hydra.run.dir=new", f"resume={list_snapshots(snapshots, 'best')[0]}"]
    assert f"resumed from {snapshots}/best_000000" in train(*words, *more).output
    assert steps_of_snapshots(tmp_path / "new")[-1] == 69


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_costs_snapshots_and_curves_but_not_the_training(train, small_disk):
    wide = [*WHOLE, "model=mlp", "model.width=128", "trainer.epochs=2", f"hydra.run.dir={small_disk}"]
    train(*wide, "trainer.max_steps=20")
    used = sum(path.stat().st_size for path in small_disk.rglob("*") if path.is_file())
    (small_disk / "ballast").write_bytes(bytes(2**21 - used - 2**17))
    run = train(*wide, "snapshot.every=5steps", code=2)
    assert f"free some space and type the command again with hydra.run.dir={small_disk}" in run.output
    assert "No space left on device" in run.output
    assert "epoch 2/2   step 46" in run.output
    assert newest_snapshot(small_disk)["progress"]["step"] >= 20


def test_the_record_of_a_run_of_two_starts(start, tmp_path):
    first, folder = [*RUN, "trainer.max_steps=30", "trainer.pause_after=1", "snapshot.every=10steps"], tmp_path / "run"
    typed = [*first, "launch=fork"]
    start(*typed, OWN_TOKEN="kqzv").finish()
    before = read_run(folder)
    assert before["command"] == shlex.join(["python", *typed[1:]])
    assert before["overrides"] == [word for word in typed[2:] if not word.startswith("hydra")]
    assert before["config"]["trainer.max_steps"] == 30
    assert before["config"]["data_dir"] == "${oc.env:LOCKSTEP_DATA,data}"
    assert before["objective"]["name"] == "val/accuracy"
    assert before["environment"].items() >= versions().items()
    assert before["code"] == code_facts() | {"modules": before["code"]["modules"]}
    assert "support.digits" in before["code"]["modules"]  # where the data set is from
    assert state_of(before) == "paused"
    shutil.rmtree(folder / "snapshots" / "step_00000021")
    start(*first, "trainer.max_steps=40", "trainer.pause_after=null").finish()
    after = read_run(folder)
    keys = ("from_step", "to_step", "world_size", "launcher", "state", "exit_code")
    assert [[life[key] for key in keys] for life in after["starts"]] == [
        [0, 21, 2, "fork", "paused", 0],  # one step is done again
        [20, 40, 1, "python", "finished", 0],
    ]
    assert (after["steps"], after["config"]["trainer.max_steps"], after["data"]) == (40, 40, before["data"])
    start(*first, "seed=1").finish(2)  # refused: another seed
    assert read_run(folder) == after
    assert "kqzv" not in (folder / "run.json").read_text()


def test_the_same_config_is_written_in_the_same_way_by_any_launcher_and_repeats_the_run(start, tmp_path):
    words = [*PYTHON_TRAIN, *SMALL, "logger=[csv]", "trainer.max_steps=2"]
    start(*words, "hydra.run.dir=one").finish()
    start(*words, "launch=fork", "hydra.run.dir=two").finish()
    one, two = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    different = {key for key in one["config"] if one["config"][key] != two["config"].get(key)}
    assert {key.partition(".")[0] for key in different if not key.endswith("run_dir")} == {"launch"}
    (evaluated,) = [value for _, tag, value in read_rows(tmp_path / "one") if tag == "val/accuracy"]
    # The same run with more steps would not have evaluated here.
    nothing = {"best": None, "step": None}
    assert one["objective"] == {"name": "val/accuracy", "mode": "max", "last": evaluated} | nothing
    start(*PYTHON_TRAIN, f"--config-path={tmp_path}/one/.hydra", "hydra.run.dir=again").finish()
    assert read_run(tmp_path / "again")["config"]["trainer.max_steps"] == 2
    assert same_bits(tmp_path / "one", tmp_path / "again")


def test_a_record_and_the_HParams_table_name_the_chosen_classes_and_only_what_they_take(start, tmp_path):
    """The best evaluation is that of the snapshot: the last one, in mid-epoch, is none that the same run with more
    steps would have."""
    net = "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    (tmp_path / "nets.py").write_text(f"from torch import nn\n{net}")
    words = ["model._target_=nets.net", "optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.05"]
    words += ["trainer.epochs=2", "trainer.max_steps=30", "hydra.run.dir=run"]
    start(*PYTHON_TRAIN, *words, PYTHONPATH=".").finish()
    run, best = read_run(tmp_path / "run"), best_snapshot(tmp_path / "run")["progress"]
    names = {"model": "nets.net", "optimizer": "torch.optim.Adagrad"}
    assert run["options"].items() >= (names | {"dataset": "digits", "task": "classification"}).items()
    assert {"optimizer.lr", "optimizer.momentum"} & run["config"].keys() == {"optimizer.lr"}
    assert (run["objective"]["best"], run["objective"]["step"]) == (best["best"], best["step"])
    assert run["objective"]["step"] == 21 < run["steps"]
    (row,) = Backend(tmp_path).rows().values()
    assert row.hyperparameters.items() >= names.items()
    assert not {"optimizer.momentum", "optimizer.nesterov", "backend"} & row.hyperparameters.keys()


def test_a_killed_run_is_told_and_another_default_does_not_replace_what_was_typed(start, tmp_path):
    words = [*PYTHON_TRAIN, *SLOW, "trainer.epochs=200", "logger=[]", "hydra.run.dir=run"]
    run = start(*words, "optimizer.lr=0.1", ema(0.9))
    wait_for(lambda: position(tmp_path / "run")[0] >= 5, "snapshot")
    assert state_of(read_run(tmp_path / "run")) == "running"
    os.kill(run.process.pid, signal.SIGKILL)
    run.finish(None)
    wait_for(lambda: state_of(read_run(tmp_path / "run")) == "killed", "state")
    told = "holds a run with optimizer.lr=0.1, and here it is 0.05; type optimizer.lr=0.1 to go on with it"
    assert told in start(*words, ema(0.5)).finish(2).sentence


def test_a_run_that_is_killed_in_its_last_evaluation_has_all_points_of_its_curve(start, tmp_path):
    typed = [*PYTHON_TRAIN, *MODEL, FEW, "trainer.batch_size=16", "trainer.max_steps=30", "snapshot.every=10steps"]
    points = {}
    for name, starts in (("whole", [(0, "")]), ("killed", [(-signal.SIGKILL, "evaluation/kill:0:2"), (0, "")])):
        for code, fault in starts:
            start(*typed, "logger=[csv]", f"hydra.run.dir={name}", FAULT=fault).finish(code)
        points[name] = [row[:2] for row in read_rows(tmp_path / name) if not row[1].startswith("speed/")]
    assert points["killed"] == points["whole"]
    assert (30, "val/loss") in points["whole"]


def test_the_best_weights_are_of_this_run_also_where_it_begins_anew_or_at_another_one(start, tmp_path):
    typed, flat = [*PYTHON_TRAIN, *MODEL, FEW, "trainer.batch_size=16", "logger=[]"], "optimizer.lr=1e-12"
    saves, others = ["monitor=val/loss", "snapshot.every=9epochs"], {name: tmp_path / name for name in ("run", "other")}

    def best(name):
        return [step_of(path) for path in list_snapshots(others[name] / "snapshots", "best")]

    start(*typed, *saves, "hydra.run.dir=run", FAULT="evaluation/kill:0:4").finish(-signal.SIGKILL)
    assert best("run")[0] >= 42  # and no snapshot to go on from
    again = ["monitor=val/accuracy", flat, "hydra.run.dir=run"]
    start(*typed, *saves, *again, "trainer.epochs=3").finish()
    assert (best("run"), read_run(others["run"])["test"]["step"]) == ([21], 21)
    mirror = f'snapshot.mirror={{_target_:lockstep.snapshots.mirror.Mirror,to:"file://{tmp_path}/copies"}}'
    again = ["monitor=val/accuracy", flat, "hydra.run.dir=other", "resume=run", "trainer.epochs=6", mirror]
    start(*typed, *again, FAULT="evaluation/kill:0:3").finish(-signal.SIGKILL)  # one of its snapshots is whole
    assert [*(tmp_path / "copies").glob("best_00000021-*/manifest.json")]
    shutil.rmtree(others["run"])
    start(*typed, *again).finish()
    assert (best("other"), read_run(others["other"])["test"]["step"]) == ([21], 21)


def test_max_time_ends_a_run_by_the_clock_and_a_resumed_run_has_the_time_that_is_left(train, tmp_path):
    words = [*WHOLE, "model=mlp", "model.width=16", "trainer.epochs=100000", "snapshot.every=1000epochs"]
    words += ["optimizer.lr=0.1", "launch=fork", "logger=[tensorboard]", "hydra.run.dir=run"]
    folder = tmp_path / "run"
    train(*words, "trainer.max_time=2s")
    run, first, curves = read_run(folder), newest_snapshot(folder), scalars(folder)
    assert (run["starts"][0]["state"], first["progress"]["step"]) == ("finished", run["steps"])
    assert 2 <= first["seconds"] < 8  # on a busy machine a vote may come late
    assert curves["test/loss"][-1][0] == run["steps"]
    assert run["objective"]["last"] == pytest.approx(curves["test/accuracy"][-1][1])
    train(*words, "trainer.max_time=2s")  # no time is left
    assert f"the run is at step {run['steps']} already; type trainer.max_time=<more>" in read_log(folder)
    train(*words, f"trainer.max_time={first['seconds'] + 1:.3f}s")
    second, lives = newest_snapshot(folder), read_run(folder)["starts"]
    assert second["progress"]["step"] > first["progress"]["step"] == lives[0]["to_step"]
    assert second["seconds"] >= first["seconds"] + 0.999
    assert second["seconds"] <= first["seconds"] + lives[-1]["ended"] - lives[-1]["started"] + 1
