"""A race between settings: its evidence, its error probability on simulated objectives, and which jobs it runs."""

import itertools
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import dblquad

from lockstep.errors import ConfigError
from lockstep.sweeps.race import Race, fewest_rounds, first_round, log_evidence, standing, threshold
from lockstep.sweeps.search import check_search, make_plan
from lockstep.sweeps.table import FAILED, FINISHED, RUNNING, SweepTable
from support.sweep_tables import settings

RATES = ["0.1", "0.2", "0.3"]


def evidence_by_count(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """The evidence after each number of pairs. differences: (races, pairs)."""
    count = np.arange(1, differences.shape[1] + 1)
    return log_evidence(count, differences.cumsum(1), (differences**2).cumsum(1))


@pytest.mark.parametrize("sample", [[0.3, 1.1, 0.4], [-0.2, 0.9, -1.3, -0.5], [2.0, 2.1], [0.7]])
def test_the_evidence_is_the_ratio_of_two_likelihoods_averaged_over_their_parameters(sample):
    """The integrals over the mean in standard deviations and the logarithm of the standard deviation, by quadrature."""

    def likelihood(effect: float, log_sd: float) -> float:
        sd = math.exp(log_sd)
        return math.exp(sum(-((value / sd - effect) ** 2) / 2 - log_sd for value in sample))

    weighted = dblquad(lambda d, s: likelihood(d, s) * 2 * math.exp(-d * d / 2) / math.sqrt(2 * math.pi), -9, 9, 0, 9)
    null = dblquad(lambda d, s: likelihood(0, s), -9, 9, 0, 1)
    values = np.array(sample)
    ours = log_evidence(len(sample), values.sum(), (values**2).sum())
    assert ours == pytest.approx(math.log(weighted[0] / null[0]), abs=1e-3)
    assert log_evidence(len(sample), 1e9 * values.sum(), 1e18 * (values**2).sum()) == pytest.approx(ours, abs=1e-9)


def test_equal_objectives_are_no_evidence_and_name_no_winner():
    assert log_evidence(50, 0.0, 0.0) == 0
    same = {setting: dict.fromkeys(range(50), 0.5) for setting in range(3)}
    now = standing(3, same, 0.99, "min")
    assert (now.left, now.dropped, len(now.rounds)) == ([0, 1, 2], {}, 50)


NOISE = {
    "normal": lambda chance, shape: chance.standard_normal(shape),
    "steps": lambda chance, shape: chance.integers(-1, 2, shape).astype(float),  # a metric that takes three values
    "heavy": lambda chance, shape: chance.standard_t(2, shape),
    "divergence": lambda chance, shape: chance.standard_normal(shape) + 100.0 * (chance.random(shape) < 0.1),
    "skewed": lambda chance, shape: chance.exponential(size=shape) - chance.exponential(size=shape) ** 2 / 2,
}


@pytest.mark.parametrize("name", NOISE)
def test_equal_settings_have_a_winner_in_at_most_a_hundredth_of_simulated_races(name):
    """20,000 races of up to 60 seeds. Differences of equal settings are symmetric, whatever the noise of one is."""
    chance = np.random.default_rng(0)
    one, other = (NOISE[name](chance, (20000, 60)) for _ in range(2))
    highest = np.abs([evidence_by_count(one - other).max(1), evidence_by_count(other - one).max(1)]).max(0)
    assert (highest >= threshold(2, 0.99)).mean() <= 0.011


def test_a_difference_of_one_standard_deviation_is_found():
    """In nine of ten races within 28 pairs, and in the wrong direction in none of them."""
    chance = np.random.default_rng(1)
    differences = 1 + chance.standard_normal((4000, 28))
    assert (evidence_by_count(differences).max(1) >= threshold(2, 0.99)).mean() == pytest.approx(0.9, abs=0.02)
    assert (evidence_by_count(-differences).max(1) >= threshold(2, 0.99)).sum() == 0


def test_settings_are_dropped_one_by_one_and_the_last_one_is_the_winner():
    """Setting 2 is best by far, 0 is second, 1 is worst, in the lower direction. The seeds' own noise is common."""
    chance = np.random.default_rng(2)
    common = chance.standard_normal(60)
    own = chance.standard_normal((3, 60)) + np.array([[2.0], [6.0], [0.0]])
    results = {setting: dict(enumerate(10 * common + own[setting])) for setting in range(3)}
    now = standing(3, results, 0.99, "min")
    assert now.left == [2]
    assert list(now.dropped) == [1, 0]
    assert len(now.rounds) == now.dropped[0] > now.dropped[1] >= fewest_rounds(3, 0.99)
    assert standing(3, results, 0.99, "max").left == [1]
    looser = standing(3, results, 0.9, "min")
    assert looser.dropped[0] < now.dropped[0]
    assert standing(3, results | {2: results[2] | {4: math.nan}}, 0.99, "min").failed == [2]


def make_race(folder: Path, trials: int = 60, **changes: object) -> Race:
    changed = settings(search="race", trials=trials, mode="max", first_seed=7, **changes)
    plan = make_plan(
        changed, ["model=mlp"], lambda: [["model=mlp", f"lr={rate}"] for rate in RATES], dict, lambda _: True
    )
    assert plan.lists == [["model=mlp", f"lr={rate}", "seed=7"] for rate in RATES]
    folder.mkdir(exist_ok=True)
    return Race(SweepTable(folder), plan, lambda number, changed, overrides: str(number), changed)


def objective(overrides: str) -> float:
    """Of a job that the race trains: 0.2 is better than 0.1 by about 1.5 standard deviations, and 0.3 far worse."""
    rate, seed = re.findall(r"=([\d.]+)", overrides)
    return (
        random.Random(overrides).gauss(0, 1)
        + {"0.1": 0.0, "0.2": 2.0, "0.3": -20.0}[rate]
        + random.Random(seed).gauss(0, 3)
    )


def run(race: Race, slots: int, chance: random.Random, fails: str = "none", jobs: int = 1000) -> None:
    """Run up to so many jobs, `slots` at once, which end in a random order. fails: the overrides of a job that does."""
    running: list[int] = []
    for _ in range(jobs):
        while len(running) < slots and (job := race.ask()) is not None:
            race.table.update(job.number, state=RUNNING)
            running.append(job.number)
        if not running:
            return
        number = running.pop(chance.randrange(len(running)))
        overrides = race.table.rows[number].overrides
        if overrides == fails:
            race.table.update(number, state=FAILED)
        else:
            race.table.update(number, state=FINISHED, objective=objective(overrides))
        race.tell(number)
    for number in running:  # a kill
        race.table.update(number, state="stopped")


def rows(race: Race) -> list[tuple[str, str, float | None]]:
    return sorted((row.overrides, row.state, row.objective) for row in race.table)


def test_a_race_is_the_same_in_any_order_with_any_slots_and_after_kills(tmp_path):
    chance = random.Random(0)
    race = make_race(tmp_path / "0")
    run(race, 1, chance)
    verdict = race.verdict()
    assert re.fullmatch(
        r"race:       lr=0.2 is best \(confidence 0.99 at every look\) after (\d+) trainings; "
        r"dropped: lr=0.3 \(after \d+ seeds\), lr=0.1 \(after (\d+) seeds\)",
        verdict,
    )
    for turn, slots in enumerate([2, 2, 3, 8], start=1):
        other = make_race(tmp_path / str(turn))
        while "yet" in other.verdict():
            run(other, slots, chance, jobs=chance.randrange(1, 20))
            other = make_race(tmp_path / str(turn))
        assert other.verdict() == verdict
        assert rows(other) == rows(race)


def test_a_race_ends_at_its_limit_and_goes_on_with_a_higher_one(tmp_path):
    race = make_race(tmp_path / "s", confidence=0.999999, trials=44)
    run(race, 1, random.Random(0))
    first = rows(race)
    assert race.verdict().startswith("race:       no winner within ")
    assert "trainings, and sweep.trials=44 allows no other seed; left: lr=0.2 (mean " in race.verdict()
    assert 42 <= len(first) <= 44
    longer = make_race(tmp_path / "s", confidence=0.999999, trials=200)
    assert "no winner yet after" in longer.verdict()
    run(longer, 1, random.Random(0))
    assert "lr=0.2 is best" in longer.verdict()
    assert set(first) < set(rows(longer))


@pytest.mark.parametrize("slots", [1, 4])
def test_a_setting_of_which_a_job_fails_leaves_the_race(tmp_path, slots):
    race = make_race(tmp_path / "s")
    run(race, slots, random.Random(0), fails="lr=0.2 seed=9")
    assert "lr=0.1 is best" in race.verdict()
    assert race.verdict().endswith("failed: lr=0.2")
    assert not any("lr=0.2 seed=20" in row.overrides for row in race.table)
    retried = make_race(tmp_path / "s", retry="failed")
    run(retried, slots, random.Random(0))
    assert "lr=0.2 is best" in retried.verdict()


def test_a_race_without_two_settings_that_finish_has_no_winner(tmp_path):
    race = make_race(tmp_path / "s")
    for _ in itertools.takewhile(lambda job: job is not None, iter(race.ask, "never")):
        pass
    for row in race.table:
        race.table.update(row.number, state=FINISHED, objective=math.nan if "0.1" not in row.overrides else 0.5)
    assert race.ask() is None
    assert race.verdict() == "race:       no winner after 21 trainings; failed: lr=0.2, lr=0.3"


@pytest.mark.parametrize(
    ("changes", "lists", "said"),
    [
        ({"trials": None}, [["lr=1"], ["lr=2"]], "needs the most jobs that it may take; type sweep.trials=60"),
        ({}, [["lr=1"]], "compares settings, and there is one; type optimizer.lr=0.1,0.05"),
        (
            {},
            [["lr=1", "seed=1"], ["lr=1", "seed=2"]],
            "repeats each setting itself, with the seeds from 0 on; leave lists of",
        ),
        ({"trials": 11}, [["lr=1"], ["lr=2"]], "of which none can win before 12 jobs; type sweep.trials=36"),
    ],
)
def test_what_no_race_can_be_is_refused(changes, lists, said):
    chosen = settings(search="race", **{"trials": 60} | changes)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_search(chosen, make_plan(chosen, [], lambda: lists, dict, lambda _: True), ["test/loss"], submits=False)


def test_a_typed_seed_is_the_first_one():
    assert first_round([["a=1", "seed=5"], ["a=2", "seed=5"]], 5) == [["a=1", "seed=5"], ["a=2", "seed=5"]]
