"""trainer.max_time ends a run by the clock, scheduler.over=time plays the schedule in it; `again` repeats both."""

import math
import re
import shlex
import sys
from typing import Any

import pytest

from lockstep.runs.record import read_run
from support.commands import PYTHON_TRAIN, ROOT
from support.event_files import scalars
from support.run_folders import newest_snapshot, read_log
from support.worlds import same_bits

pytestmark = pytest.mark.whole
LONG = ["model=mlp", "model.width=16", "trainer.epochs=1000", "snapshot.every=1000epochs", "optimizer.lr=0.1"]


def test_a_run_over_a_time_ends_near_it_and_again_repeats_its_bits_and_rates(start: Any) -> None:
    words = [*LONG, "trainer.max_time=3s", "scheduler.over=time", "scheduler.final_lr_ratio=0.1", "logging.every=1"]
    words += ["launch=fork", "launch.nproc_per_node=2", "scheduler.warmup_epochs=100", "logger=[tensorboard]"]
    folder = start(*PYTHON_TRAIN, *words, "hydra.run.dir=timed").finish().cwd / "timed"
    run, saved = read_run(folder), newest_snapshot(folder)
    steps, shares, life = run["steps"], run["time_shares"], run["lives"][0]
    assert (life["state"], saved["progress"]["step"]) == ("finished", steps)
    assert 3 <= saved["seconds"] < 9  # on a busy machine a vote may come late
    curves = scalars(folder)
    assert curves["test/loss"][-1][0] == steps
    assert run["objective"]["last"] == pytest.approx(curves["test/accuracy"][-1][1])

    assert len(shares) >= 6
    whole = 1000 * 23  # steps of the schedule
    for step, rate in curves["train/lr"]:  # the rate after this step
        agreed = [pair for pair in zip(shares[::2], shares[1::2], strict=True) if pair[0] < step]
        place = min(1.0, agreed[-1][1] / 1e6 * step / agreed[-1][0]) * whole if agreed else step
        assert rate == pytest.approx(0.1 * cosine(place, 2300, whole), rel=1e-5)
    assert curves["train/lr"][-1][1] < 0.05 < max(rate for _, rate in curves["train/lr"])

    again = start(sys.executable, str(ROOT / "src" / "runs.py"), "again", "timed").finish()
    (typed,) = re.findall("^train again: +(.*)$", again.output, re.MULTILINE)
    assert f"trainer.max_time={steps}steps" in typed
    start(*PYTHON_TRAIN, *shlex.split(typed)[2:]).finish()
    repeated = folder.with_name("timed-again")
    assert same_bits(folder, repeated)
    assert scalars(repeated)["train/lr"] == curves["train/lr"]
    assert read_run(repeated)["objective"] == run["objective"]


def cosine(place: float, warmup: int, whole: int) -> float:
    """The factor of the learning rate with scheduler=cosine and final_lr_ratio=0.1."""
    if place < warmup:
        return (place + 1) / warmup
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (place - warmup) / (whole - warmup))) / 2


def test_a_resumed_run_has_the_time_that_is_left(train: Any) -> None:
    words = [*LONG, "trainer.epochs=100000", "hydra.run.dir=run", "logger=[]", "optimizer.momentum=0.5"]
    folder = train(*words, "trainer.max_time=1s").cwd / "run"
    first = newest_snapshot(folder)
    train(*words, "trainer.max_time=1s")  # no time is left
    assert f"the run is at step {read_run(folder)['steps']} already; type trainer.max_time=<more>" in read_log(folder)
    train(*words, f"trainer.max_time={first['seconds'] + 1:.3f}s")
    second, lives = newest_snapshot(folder), read_run(folder)["lives"]
    assert second["progress"]["step"] > first["progress"]["step"] == lives[0]["to_step"]
    assert second["seconds"] >= first["seconds"] + 0.999
    assert second["seconds"] <= first["seconds"] + lives[-1]["ended"] - lives[-1]["started"] + 1


@pytest.mark.parametrize("scheduler", ["plateau", "torch"])
def test_a_schedule_that_goes_on_from_the_rate_before_cannot_be_over_time(train: Any, scheduler: str) -> None:
    run = train(f"scheduler={scheduler}", "trainer.max_time=1min", "scheduler.over=time", "model=linear", code=2)
    assert "scheduler.over=time needs a schedule that is a function of the step" in run.sentence
    assert run.sentence.endswith("type scheduler=cosine, or scheduler.over=steps")
