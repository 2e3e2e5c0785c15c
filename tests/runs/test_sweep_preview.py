"""`sweep.preview=true`: the jobs that would run, how long they may take, and that nothing is written."""

import json
import re
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN

SHORT = ["model=linear", "trainer.epochs=1", "logger=[]", "-m"]


def files(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below `folder`, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def previewed(output: str) -> list[tuple[str, ...]]:
    """(job, seconds, what it changes) of each line of the table."""
    return re.findall(r"^ +(\d+) +(\S+) +(.*)$", output, re.MULTILINE)


def test_a_preview_shows_the_jobs_that_are_left_and_the_time_of_runs_like_them(start):
    sweep = [*PYTHON_TRAIN, *SHORT, "hydra.sweep.dir=s"]
    run = start(*sweep, "optimizer.lr=0.1,0.2").finish()
    lives = [json.loads(path.read_text())["lives"] for path in run.cwd.glob("s/*/run.json")]
    times = [life["ended"] - life["started"] for (life,) in lives]
    before = files(run.cwd)
    preview = start(*sweep, "optimizer.lr=0.1,0.2,0.3", "trainer.batch_size=64", "sweep.preview=true").finish()
    assert "preview of 1 jobs, 2 more are over or run elsewhere; nothing runs" in preview.output
    ((number, seconds, changes),) = previewed(preview.output)
    assert (number, changes) == ("2", "optimizer.lr=0.3")
    assert float(seconds) == pytest.approx(sum(times) / 2, abs=0.06)
    resumed = start(*PYTHON_TRAIN, "-m", "sweep.resume=s", "sweep.preview=true").finish()
    assert "preview of 0 jobs, 2 more are over" in resumed.output
    refused = start(*sweep, "optimizer.lr=0.1,0.2", "trainer.batch_size=32", "sweep.preview=true").finish(2)
    assert "was begun with another config or other code: trainer.batch_size (64 then, 32 now)" in refused.sentence
    other = start(*sweep, "trainer.batch_size=32,64", "hydra.sweep.dir=t", "sweep.preview=true").finish()
    assert [cells[1:] for cells in previewed(other.output)] == [
        ("unknown", f"trainer.batch_size={n}") for n in (32, 64)
    ]
    assert files(run.cwd) == before


@pytest.mark.parametrize(
    ("words", "jobs", "more"),
    [
        (["seed=1,2", "sweep.slots=2"], ["seed=1", "seed=2"], ""),
        (
            ["sweep.search=halving", "seed=1,2,3", "trainer.epochs=4"],
            [f"seed={seed}, to epoch 1 of 4" for seed in (1, 2, 3)],
            "halving trains 3 to epoch 1, 1 to epoch 2, 1 to epoch 4;",
        ),
        (["sweep.search=tpe", "sweep.trials=9", "seed=1"], None, "nothing varies in this sweep"),
        (["sweep.search=tpe", "sweep.trials=9", "optimizer.lr=0.1,0.2"], [None], "tpe runs 9 jobs in all;"),
    ],
    ids=["slots", "halving", "refused", "tpe"],
)
def test_the_preview_of_a_search_says_what_is_known(start, words, jobs, more):
    run = start(*PYTHON_TRAIN, *SHORT, *words, "sweep.preview=true").finish(2 if jobs is None else 0)
    assert more in run.output
    shown = [changes for *_, changes in previewed(run.output)]
    assert shown == jobs if jobs and jobs[0] else len(shown) == len(jobs or [])
    assert files(run.cwd) == {}


def test_the_preview_of_random_draws_is_what_the_sweep_then_draws(start):
    drawn = [*PYTHON_TRAIN, *SHORT, "sweep.search=random", "sweep.trials=2", "optimizer.lr=interval(0.01,0.1)"]
    preview = start(*drawn, "sweep.preview=true").finish()
    run = start(*drawn, "hydra.sweep.dir=s").finish()
    assert [f"sweep: job {number}, {changes}" for number, _, changes in previewed(preview.output)] == re.findall(
        r"^sweep: job .*", run.output, re.MULTILINE
    )


def test_a_preview_under_torchrun_is_printed_once_and_one_of_a_single_run_is_refused(start):
    words = ["--standalone", "--nproc_per_node=2", TRAIN, *SHORT, "seed=1,2", "sweep.preview=true"]
    run = start(*TORCHRUN, *words).finish()
    assert run.output.count("sweep: preview of 2 jobs") == 1
    assert files(run.cwd) == {}
    single = start(*PYTHON_TRAIN, *SHORT[:-1], "sweep.preview=true").finish(2)
    assert "this is one run; type -m sweep.preview=true" in single.sentence
