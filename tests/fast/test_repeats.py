"""What repeated runs tell: the formulas against scipy's, and by simulation."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from lockstep.runs.repeats import (
    decimals_for,
    estimate,
    is_share,
    paired,
    pairs_for,
    setting_of,
    split_overlap,
    unpaired,
    wilson,
)

A, B = [0.91, 0.93, 0.92, 0.95, 0.9], [0.93, 0.94, 0.95, 0.96, 0.93]


def test_a_mean_has_the_interval_of_student_s_t() -> None:
    found = estimate(A)
    assert (found.mean, found.std, found.count) == (pytest.approx(np.mean(A)), pytest.approx(np.std(A, ddof=1)), 5)
    assert found.interval == pytest.approx(stats.t.interval(0.95, 4, np.mean(A), stats.sem(A)), rel=1e-12)


@pytest.mark.parametrize("values", [[0.9], [0.9, 0.9, 0.9], [0.9, math.nan]], ids=str)
def test_where_nothing_tells_the_spread_there_is_no_interval(values: list[float]) -> None:
    assert estimate(values).interval is None
    assert estimate(values).visible is None


def test_differences_have_the_intervals_of_the_two_t_tests() -> None:
    interval = stats.ttest_rel(B, A).confidence_interval(0.95)
    assert paired(A, B).interval == pytest.approx(tuple(interval), rel=1e-9)
    for other in (B, B[:3], [0.5, 0.99]):
        interval = stats.ttest_ind(other, A, equal_var=False).confidence_interval(0.95)
        assert unpaired(A, other).interval == pytest.approx(tuple(interval), rel=1e-9)
    assert unpaired(A, [0.5]).interval is None
    assert unpaired(A, B).count == 5  # equal counts and spreads that differ: the count stays


@pytest.mark.parametrize("count", [2, 3, 5, 20, 200])
def test_the_visible_difference_is_seen_with_a_power_of_80_percent(count: int) -> None:
    found = estimate([*[-1.0] * (count // 2), *[1.0] * (count - count // 2)])
    assert found.visible is not None
    shift, critical = found.visible / found.error, stats.t.ppf(0.975, count - 1)
    power = stats.nct.sf(critical, count - 1, shift) if count > 2 else _power_of_two(shift)
    assert power == pytest.approx(0.8, abs=2e-6 if count > 2 else 5e-3)
    needed = pairs_for(found.visible * (1 + 1e-9), found.std)
    assert needed == count
    assert pairs_for(found.visible * 0.98, found.std) != count


def _power_of_two(shift: float) -> float:
    """By integration: scipy's noncentral t is not a number there."""
    chi = np.sqrt(stats.chi2.ppf((np.arange(200_000) + 0.5) / 200_000, 1))
    return float(np.mean(stats.norm.sf(stats.t.ppf(0.975, 1) * chi - shift)))


def test_a_difference_that_is_too_small_needs_more_pairs_than_anybody_trains() -> None:
    assert pairs_for(1e-6, 1.0) is None
    assert pairs_for(0.5, 1.0, overlap=0.25) is None  # more folds do not make the samples more


def simulated(repeats: int, count: int, correlation: float) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(0)
    common = chance.normal(size=(repeats, count)) * math.sqrt(correlation)
    one, other = (common + chance.normal(size=(repeats, count)) * math.sqrt(1 - correlation) for _ in range(2))
    return one, other


def holds(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and interval[0] <= value <= interval[1]


@pytest.mark.parametrize("count", [2, 5])
def test_the_intervals_cover_the_truth_in_95_of_100(count: int) -> None:
    """Of 4,000 repeats; three standard deviations are 1 %. The difference is 0.3 in truth."""
    one, other = simulated(4000, count, correlation=0.6)
    found = {
        "mean": np.mean([holds(estimate(a.tolist()).interval, 0) for a in one]),
        "paired": np.mean(
            [holds(paired(a.tolist(), (b + 0.3).tolist()).interval, 0.3) for a, b in zip(one, other, strict=True)]
        ),
    }
    independent = np.random.default_rng(1).normal(size=one.shape) * 2
    welch = [
        holds(unpaired(a.tolist(), (b + 0.3).tolist()).interval, 0.3) for a, b in zip(one, independent, strict=True)
    ]
    assert all(abs(share - 0.95) < 0.011 for share in found.values()), found
    assert np.mean(welch) > 0.94  # Welch's is a little wide for two numbers


def test_so_many_pairs_see_a_difference_in_80_of_100() -> None:
    needed = pairs_for(1.0, math.sqrt(2 * (1 - 0.6)))
    assert needed is not None
    one, other = simulated(4000, needed, correlation=0.6)
    seen = [not holds(paired(a.tolist(), (b + 1.0).tolist()).interval, 0) for a, b in zip(one, other, strict=True)]
    assert 0.78 < np.mean(seen) < 0.90  # a whole number of pairs is a little more than what 80 % need
    one, other = simulated(4000, needed - 1, correlation=0.6)
    assert (
        np.mean(
            [not holds(paired(a.tolist(), (b + 1.0).tolist()).interval, 0) for a, b in zip(one, other, strict=True)]
        )
        < 0.81
    )


def test_folds_share_samples_and_so_their_interval_is_wider() -> None:
    """Cross validation of the mean as a predictor, whose true error is known: the plain interval is too narrow."""
    chance, plain, corrected = np.random.default_rng(0), [], []
    overlap = split_overlap([{"config": {"loader.folds": 5, "loader.fold": fold}} for fold in range(5)])
    for _ in range(1500):
        values = chance.exponential(size=20)
        folds = values.reshape(5, 4)
        errors = [float(np.mean((fold - np.delete(folds, n, 0).mean()) ** 2)) for n, fold in enumerate(folds)]
        truth = 1 + 1 / 16  # the variance, and that of the mean of 16
        plain.append(holds(estimate(errors).interval, truth))
        corrected.append(holds(estimate(errors, overlap).interval, truth))
    assert np.mean(corrected) > np.mean(plain) + 0.03
    assert estimate(A, overlap).error == pytest.approx(np.std(A, ddof=1) * math.sqrt(1 / 5 + 1 / 4))


def drawn_run(split_seed: int, seed: int = 0, data: str | None = None) -> dict[str, dict[str, object]]:
    """A run that has held out 10 of 50 samples."""
    samples = {"training_samples": 40, "validation_samples": 10, "validation_data": data or f"split {split_seed}"}
    return {"config": {"loader.split_seed": split_seed, "seed": seed}, "data": samples}


def test_splits_that_are_drawn_again_share_samples_too() -> None:
    """As above, with ten of 50 samples held out, five times."""
    chance, plain, corrected = np.random.default_rng(0), [], []
    overlap = split_overlap([drawn_run(seed) for seed in range(5)])
    for _ in range(1500):
        values, errors = chance.exponential(size=50), []
        for _ in range(5):
            rows = chance.permutation(50)[:10]
            errors.append(float(np.mean((values[rows] - np.delete(values, rows).mean()) ** 2)))
        truth = 1 + 1 / 40
        plain.append(holds(estimate(errors).interval, truth))
        corrected.append(holds(estimate(errors, overlap).interval, truth))
    assert np.mean(corrected) > np.mean(plain) + 0.05
    assert overlap == 1 / 4
    assert split_overlap([drawn_run(0, seed) for seed in range(5)]) == 0
    assert split_overlap([drawn_run(seed, data="its own") for seed in range(5)]) == 0
    shares = [drawn_run(seed) for seed in range(5)]  # as of a text, whose training windows overlap
    assert split_overlap([run | {"config": run["config"] | {"loader.validation": 0.1}} for run in shares]) == 0.1 / 0.9


@pytest.mark.parametrize(("hits", "count"), [(0, 10), (36, 360), (359, 360), (10, 10)])
def test_wilson_s_interval(hits: int, count: int) -> None:
    expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert wilson(hits / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["optimizer.lr=0.1", "seed=3"], ("optimizer.lr=0.1",)),
        (["+loader.fold=2", "model.seed=1", "loader.split_seed=5"], ("model.seed=1",)),
        (["seed=1"], ()),
    ],
    ids=str,
)
def test_the_words_of_a_setting(words: Sequence[str], setting: tuple[str, ...]) -> None:
    assert setting_of(words) == setting


def test_numbers_are_shown_with_two_digits_of_their_spread() -> None:
    assert [decimals_for([estimate(values)]) for values in (A, [100.0, 300.0], [1e-5, 2e-5], [0.5])] == [3, 0, 7, 4]
    assert [is_share(name) for name in ("accuracy", "top5", "f1", "topology", "loss")] == [
        True,
        True,
        False,
        False,
        False,
    ]
