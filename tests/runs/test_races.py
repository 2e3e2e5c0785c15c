"""`sweep.search=race` with real trainings: it ends when one setting is best, and a killed one gives the same table."""

import re

import pytest

from support.commands import PYTHON_TRAIN
from support.sweep_tables import column, rows_of

RACE = [*PYTHON_TRAIN, "-m", "model=linear", "trainer.epochs=1", "logger=[]", "sweep.search=race", "hydra.sweep.dir=s"]


def test_a_race_of_two_learning_rates_ends_with_the_better_one_and_goes_on_after_a_kill(start):
    words = ["optimizer.lr=0.1,0.01", "seed=5", "sweep.trials=20"]
    run = start(*RACE, *words, "sweep.slots=2").finish()
    (verdict, trainings, seeds) = re.findall(
        r"^(race:       optimizer.lr=0.1 is best \(confidence 0.99 at every look\) after (\d+) trainings; "
        r"dropped: optimizer.lr=0.01 \(after (\d+) seeds\)\n)",
        run.output,
        re.MULTILINE,
    )[0]
    assert 12 <= int(trainings) == 2 * int(seeds) < 20
    folder = run.cwd / "s"
    pairs = [f"optimizer.lr={rate} seed={seed}" for seed in range(5, 5 + int(seeds)) for rate in ("0.1", "0.01")]
    assert column(folder, "overrides") == pairs
    objectives = column(folder, "objective")
    table = (folder / "sweep.csv").read_text().splitlines()
    lost = [
        table[9].replace(",finished,", ",running,"),
        *table[11:12],
    ]  # one job ended with the parent, others never began
    (folder / "sweep.csv").write_text("\n".join([*table[:9], *lost, ""]))
    again = start(*RACE, *words, "sweep.slots=2").finish()
    assert len(re.findall(r"^sweep: job ", again.output, re.MULTILINE)) == int(trainings) - 9
    assert verdict in again.output
    found = {row["overrides"]: row["objective"] for row in rows_of(folder)}
    assert found == dict(zip(pairs, objectives, strict=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["optimizer.lr=0.1,0.2", "sweep.trials=5"],
            "sweep.trials=5 is too few for a race of 2 settings, of which none",
        ),
        (["optimizer.lr=0.1,0.2", "seed=1,2", "sweep.trials=50"], "sweep.search=race repeats each setting itself, "),
        (["optimizer.lr=0.1", "sweep.trials=50"], "sweep.search=race compares settings, and there is one; type"),
    ],
)
def test_what_is_no_race_is_refused_before_the_first_job(start, words, said):
    run = start(*RACE, *words).finish(2)
    assert said in run.sentence
    assert not (run.cwd / "s").exists()


def test_a_race_that_reaches_its_limit_names_no_winner(start):
    """Two settings of which one changes no number: all objectives are the same."""
    run = start(*RACE, "logging.every=10,11", "sweep.trials=13", "optimizer.lr=0.1").finish()
    assert (
        "no winner within 12 trainings, and sweep.trials=13 allows no other seed; left: logging.every=10" in run.output
    )
    assert len(set(column(run.cwd / "s", "objective"))) <= 6
