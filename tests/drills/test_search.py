"""Searches in real sweeps: what a kill, a slot more or several ranks change, which is nothing; what choosing costs."""

import dataclasses
import json
import os
import random
import re
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from lockstep.sweeps.table import Row, read_table
from support.commands import PYTHON_TRAIN, ROOT, Command, own_data, wait_for

pytestmark = pytest.mark.drill

# 7 jobs up to epoch 1, of which one fails, 3 up to epoch 2, 1 up to epoch 4.
RATES = "optimizer.lr=0.1,0.05,1e10,0.02,0.3,0.005,0.01"
JOBS = ["-m", "model=mlp", "trainer.epochs=4", "snapshot.every=5steps", RATES]
HALVING = ["sweep.search=halving", "sweep.eta=2", "hydra.sweep.dir=s"]
SLOTS = min(2, len(os.sched_getaffinity(0)))


def results(folder: Path) -> list[Row]:
    """The rows without what depends on time."""
    return [dataclasses.replace(row, seconds=0.0, cause="") for row in read_table(folder)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """A sweep of one job at a time."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Command([*PYTHON_TRAIN, *JOBS, *HALVING], folder).finish(1)
    assert "trained:    11 epochs, 0.39 of the 28 of all jobs" in run.output
    return results(folder / "s")


def test_the_best_jobs_of_each_rung_go_on(undisturbed):
    rungs = {row.number: dict(pair.split(":") for pair in row.rungs.split()) for row in undisturbed}
    assert [row.state for row in undisturbed].count("pruned") == 5
    assert undisturbed[2].state == "failed"
    by_first = sorted(
        (row for row in undisturbed if row.rungs), key=lambda row: (-float(rungs[row.number]["1"]), row.number)
    )
    second = [row for row in undisturbed if "2" in rungs[row.number]]
    assert {row.number for row in second} == {row.number for row in by_first[:3]}
    (best,) = [row for row in undisturbed if row.state == "finished"]
    assert best.number == min(second, key=lambda row: (-float(rungs[row.number]["2"]), row.number)).number
    assert rungs[best.number]["4"] == repr(best.objective)


def test_a_killed_search_in_two_slots_ends_with_the_same_table(start, undisturbed):
    """kill -9 of the parent alone, twice at random moments, and the same command after each."""
    moments = random.Random(5)
    command = [*PYTHON_TRAIN, *JOBS, *HALVING, f"sweep.slots={SLOTS}"]
    for _ in range(2):
        run = start(*command)
        wait_for((run.cwd / "s" / "sweep.csv").exists, "table")
        time.sleep(moments.uniform(0.2, 2))
        with suppress(ProcessLookupError):  # on a fast machine the sweep may have ended
            run.send(signal.SIGKILL)
        run.process.wait()
    run = start(*command).finish(1)
    assert results(run.cwd / "s") == undisturbed
    other = start(*command, "sweep.eta=3").finish(2)
    assert "sweep.eta (2 then, 3 now)" in other.sentence


def test_ranks_pause_at_the_same_step_and_go_on_with_the_same_bits(start):
    """The job that is promoted ends with the objective that it has in a sweep without a search."""
    sweep = ["-m", "model=mlp", "trainer.epochs=2", "optimizer.lr=0.001,0.1"]
    search = start(*PYTHON_TRAIN, "launch=torchrun", *sweep, *HALVING).finish()
    start(*PYTHON_TRAIN, "launch=fork", *sweep, "hydra.sweep.dir=list").finish()
    searched, listed = results(search.cwd / "s"), results(search.cwd / "list")
    assert [row.state for row in searched] == ["pruned", "finished"]
    assert searched[1].objective == listed[1].objective
    assert (searched[1].best, searched[1].best_step) == (listed[1].best, listed[1].best_step)
    lives = json.loads((search.cwd / "s" / searched[1].folder / "run.json").read_text())["lives"]
    assert [(life["state"], life["to_step"], life["world_size"]) for life in lives] == [
        ("paused", 21, 2),
        ("finished", 42, 2),
    ]
    assert searched[0].rungs == f"1:{searched[0].objective!r}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trainer.epochs=4,8"], "sweep.search=halving sets the epochs of each job; leave trainer.epochs= out"),
        (["trainer.pause_after=2", "seed=1,2"], "leave trainer.pause_after= out"),
        (
            ["sweep.first_rung=5", "seed=1,2"],
            "sweep.first_rung=5 must be less than trainer.epochs=5; type trainer.epochs=10",
        ),
        (["launch=slurm", "seed=1,2"], "launch=slurm does not; type launch=env"),
    ],
    ids=["epochs", "pause", "first rung", "slurm"],
)
def test_what_a_search_cannot_run_is_refused(start, words, sentence):
    run = start(*PYTHON_TRAIN, "-m", "sweep.search=halving", *words).finish(2)
    assert sentence in run.sentence


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


RACE = ["-m", "model=linear", "trainer.epochs=1", "snapshot.every=5steps", "optimizer.lr=0.01,0.1"]
RACE += ["sweep.search=race", "sweep.trials=40", "hydra.sweep.dir=s"]


@pytest.mark.parametrize("launch", ["env", "torchrun"])
def test_a_race_that_is_killed_twice_ends_with_the_same_table_and_verdict(start, launch):
    """kill -9 of the parent alone."""
    launcher = [*PYTHON_TRAIN, f"launch={launch}"]
    whole = start(*launcher, *RACE, "hydra.sweep.dir=whole").finish()
    (verdict,) = re.findall("^race: .*", whole.output, re.MULTILINE)
    assert "optimizer.lr=0.1 is best (confidence 0.99 at every look)" in verdict
    for jobs in (3, 9):
        run = start(*launcher, *RACE)
        wait_for(partial(has_rows, run.cwd / "s", jobs), "job", limit=120)
        run.send(signal.SIGKILL)
        run.process.wait()
    run = start(*launcher, *RACE).finish()
    assert re.findall("^race: .*", run.output, re.MULTILINE) == [verdict]
    assert results(run.cwd / "s") == results(whole.cwd / "whole")


def test_random_draws_are_a_list_that_halving_can_use(start):
    """More trials go on with the same jobs. Without Optuna."""
    run = start(*PYTHON_TRAIN, *DRAWN, "sweep.search=random", "sweep.trials=2").finish()
    first = results(run.cwd / "s")
    run = start(*PYTHON_TRAIN, *DRAWN, "sweep.search=random", "sweep.trials=4").finish()
    more = results(run.cwd / "s")
    assert more[:2] == first
    assert len({row.overrides for row in more}) == 4
    run = start(*PYTHON_TRAIN, *DRAWN, "sweep.search=halving", "sweep.trials=4", "hydra.sweep.dir=h").finish()
    halved = results(run.cwd / "h")
    assert [row.overrides for row in halved] == [row.overrides for row in more]
    assert sorted(row.state for row in halved) == ["finished", "finished", "pruned", "pruned"]


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
