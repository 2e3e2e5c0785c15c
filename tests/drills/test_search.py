"""Searches in real sweeps: what a kill, a slot more or several ranks change, which is nothing; what choosing costs."""

import dataclasses
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from lockstep.sweeps.table import Row, read_table
from support.commands import PYTHON_TRAIN, ROOT, own_data, wait_for

pytestmark = pytest.mark.drill

SLOTS = min(2, len(os.sched_getaffinity(0)))


def results(folder: Path) -> list[Row]:
    """The rows without what depends on time."""
    return [dataclasses.replace(row, seconds=0.0, cause="") for row in read_table(folder)]


def has_rows(folder: Path, count: int) -> bool:
    return len(read_table(folder)) >= count


DRAWN = ["-m", "model=linear", "trainer.epochs=2", "snapshot.every=5steps", "optimizer.lr=tag(log,interval(0.001,1))"]
DRAWN += ["trainer.batch_size=64,128", "sweep.trials=14", "hydra.sweep.dir=s"]


def test_a_killed_search_with_optuna_ends_with_the_same_table(start):
    """Jobs 0 to 9 are random, the others are drawn from results. kill -9 while there are results to draw from."""
    pytest.importorskip("optuna")
    command = [*PYTHON_TRAIN, *DRAWN, "sweep.search=tpe", f"sweep.slots={SLOTS}"]
    whole = results(start(*command, "hydra.sweep.dir=whole").finish().cwd / "whole")
    assert [row.state for row in whole] == ["finished"] * 14
    assert len({row.overrides for row in whole}) == 14
    for jobs in (3, 11):
        run = start(*command)
        wait_for(partial(has_rows, run.cwd / "s", jobs), "job", limit=120)
        run.send(signal.SIGKILL)
        run.process.wait()
    run = start(*command).finish()
    assert results(run.cwd / "s") == whole


def test_more_random_trials_go_on_with_the_same_jobs(start):
    """Without Optuna."""
    run = start(*PYTHON_TRAIN, *DRAWN, "sweep.search=random", "sweep.trials=2").finish()
    first = results(run.cwd / "s")
    run = start(*PYTHON_TRAIN, *DRAWN, "sweep.search=random", "sweep.trials=4").finish()
    more = results(run.cwd / "s")
    assert more[:2] == first
    assert len({row.overrides for row in more}) == 4


def test_the_test_number_of_the_best_of_16_settings_covers_chance_where_labels_are_random(start):
    """The number that chose is above chance. In the long run one such interval of 20 does not cover it."""
    words = [
        *own_data("support.own_data.random_labels"),
        "model=linear",
        "trainer.epochs=1",
        "logger=[]",
        "hydra.sweep.dir=s",
    ]
    lists = ["optimizer.lr=0.01,0.03,0.1,0.3", "trainer.batch_size=32,64,128,256"]
    run = start(*PYTHON_TRAIN, "-m", *words, *lists, PYTHONPATH=ROOT / "tests").finish()
    ((chosen, test, low, high),) = re.findall(
        r"^choosing: +val/accuracy (\S+) is the best of 16, and so it is optimistic; "
        r"test/accuracy (\S+) had no part in it \(95 %: (\S+) to (\S+), from 360 test samples\)$",
        run.output,
        re.MULTILINE,
    )
    objectives = [row.objective for row in results(run.cwd / "s")]
    assert len(objectives) == 16
    assert float(chosen) == pytest.approx(max(objectives), rel=1e-5)
    assert float(low) <= 1 / 10 <= float(high)
    assert float(low) <= float(test) <= float(high)
    assert float(chosen) > 1 / 10
