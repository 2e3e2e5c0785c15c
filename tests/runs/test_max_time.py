"""trainer.max_time ends a run by the clock."""

from typing import Any

import pytest

from lockstep.runs.record import read_run
from support.commands import PYTHON_TRAIN
from support.event_files import scalars
from support.run_folders import newest_snapshot, read_log

pytestmark = pytest.mark.whole
LONG = ["model=mlp", "model.width=16", "trainer.epochs=100000", "snapshot.every=1000epochs", "optimizer.lr=0.1"]


def test_a_run_ends_near_its_time_with_an_evaluation_and_a_snapshot(start: Any) -> None:
    words = [*LONG, "trainer.max_time=3s", "logger=[tensorboard]"]
    words += ["launch=fork", "launch.nproc_per_node=2"]
    folder = start(*PYTHON_TRAIN, *words, "hydra.run.dir=timed").finish().cwd / "timed"
    run, saved = read_run(folder), newest_snapshot(folder)
    assert (run["starts"][0]["state"], saved["progress"]["step"]) == ("finished", run["steps"])
    assert 3 <= saved["seconds"] < 9  # on a busy machine a vote may come late
    curves = scalars(folder)
    assert curves["test/loss"][-1][0] == run["steps"]
    assert run["objective"]["last"] == pytest.approx(curves["test/accuracy"][-1][1])


def test_a_resumed_run_has_the_time_that_is_left(train: Any) -> None:
    words = [*LONG, "hydra.run.dir=run", "logger=[]", "optimizer.momentum=0.5"]
    folder = train(*words, "trainer.max_time=1s").cwd / "run"
    first = newest_snapshot(folder)
    train(*words, "trainer.max_time=1s")  # no time is left
    assert f"the run is at step {read_run(folder)['steps']} already; type trainer.max_time=<more>" in read_log(folder)
    train(*words, f"trainer.max_time={first['seconds'] + 1:.3f}s")
    second, lives = newest_snapshot(folder), read_run(folder)["starts"]
    assert second["progress"]["step"] > first["progress"]["step"] == lives[0]["to_step"]
    assert second["seconds"] >= first["seconds"] + 0.999
    assert second["seconds"] <= first["seconds"] + lives[-1]["ended"] - lives[-1]["started"] + 1
