"""`python src/runs.py compare` and the formulas below it, against scipy's t-tests and by simulation."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from lockstep.errors import ConfigError
from lockstep.runs.compare import compare, verdict
from lockstep.runs.record import read_run
from lockstep.runs.samples import of_differences, samples_table
from lockstep.runs.stats import estimate, is_share, over_samples, pairs_for, welch, wilson
from lockstep.runs.table import rho_of, row_of
from support.made_runs import make_run

A, B = [0.91, 0.93, 0.92, 0.95, 0.9], [0.93, 0.94, 0.95, 0.96, 0.93]
B_MINUS_A = [b - a for a, b in zip(A, B, strict=True)]


def make_sweep(folder, rate, values, first_seed=1, **changes):
    """Runs with the seeds from `first_seed` on. A value of nan: the run has failed."""
    for seed, value in enumerate(values, first_seed):
        state, best = ("failed", None) if value != value else ("finished", value)
        make_run(Path(folder, f"{rate}-{seed}"), best, state, optimizer__lr=rate, seed=seed, **changes)


# The formulas.


def test_intervals_are_those_of_the_t_tests():
    assert estimate(A).interval == pytest.approx(stats.t.interval(0.95, 4, np.mean(A), stats.sem(A)), rel=1e-12)
    assert estimate(B_MINUS_A).interval == pytest.approx(tuple(stats.ttest_rel(B, A).confidence_interval()), rel=1e-9)
    for other in (B, B[:3], [0.5, 0.99]):
        interval = stats.ttest_ind(other, A, equal_var=False).confidence_interval()
        assert welch(A, other).interval == pytest.approx(tuple(interval), rel=1e-9)
    assert (welch(A, [0.5]).interval, welch(A, B).count) == (None, 5)
    for values in ([0.9], [0.9, 0.9, 0.9], [0.9, math.nan]):  # nothing tells the spread
        assert estimate(values).interval is None
    for hits, count in ((0, 10), (36, 360), (359, 360), (10, 10)):
        expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
        assert wilson(hits / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
        assert over_samples("accuracy", hits / count, None, count) == wilson(hits / count, count)
    assert over_samples("loss", 1.0, 0.1, 5) == pytest.approx((1 - 0.1959964, 1 + 0.1959964))
    assert over_samples("f1", 0.5, None, 5) is None
    assert [name for name in ("accuracy", "top5", "f1", "topology", "loss") if is_share(name)] == ["accuracy", "top5"]
    for count in (3, 5, 20, 200):  # pairs that see a difference in 80 of 100 cases
        seen = special.nctdtrinc(count - 1, 0.2, stats.t.ppf(0.975, count - 1)) / math.sqrt(count)  # in deviations
        assert pairs_for(seen, 1.0) == pytest.approx(count, abs=1)
    assert pairs_for(1e-6, 1.0) is pairs_for(0.5, 1.0, rho=0.25) is None  # more folds do not make the samples more


def test_folds_and_splits_share_samples_and_so_their_interval_is_wider(tmp_path):
    def rho(key, data=None, **config):
        """Of five runs that differ in a key, each of which has held out 10 of 50 samples."""
        rows = []
        for number in range(5):
            run = read_run(make_run(tmp_path / f"{len([*tmp_path.iterdir()])}", **{key: number}, **config))
            held_out = {"validation_samples": 10, "validation_data": data or str(number)}
            rows.append(row_of(run | {"data": {"training_samples": 40, **held_out}}))
        return rho_of(rows)

    assert rho("loader__fold", loader__folds=5) == rho("loader__split_seed") == 1 / 4
    assert rho("seed", "the same") == rho("loader__split_seed", "its own") == 0
    assert rho("loader__split_seed", loader__validation=0.1) == 0.1 / 0.9


def of_hits(chance, samples, share):
    a, b = (chance.random(samples) < share for _ in range(2))
    return of_differences((a.astype(float) - b).tolist())


KINDS = {  # of two equal sides
    "seeds": lambda chance: estimate(np.subtract(*(chance.normal(size=5) + chance.normal(size=(2, 5)))).tolist()),
    "others": lambda chance: welch(chance.normal(size=5).tolist(), (3 * chance.normal(size=4)).tolist()),
    "360 samples": lambda chance: of_hits(chance, 360, 0.9),
    "few differ": lambda chance: of_hits(chance, 100, 0.99),
    "losses": lambda chance: of_differences(np.subtract(*chance.exponential(size=(2, 360)) ** 2).tolist()),
}


def test_equal_sides_are_told_apart_in_at_most_5_of_100():
    for kind, difference in KINDS.items():
        chance = np.random.default_rng(0)
        told = ["is better" in verdict(difference(chance), "pairs", "max", 1, "") for _ in range(1000)]
        assert np.mean(told) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000), kind


UNTOLD, NO_SPREAD = "cannot be told apart: ", "tells no spread; train both with seed=1,2,3,4,5"
VERDICTS = [
    ([0.2, 0.4, 0.6, 0.5, 0.4], "B is better by 0.42 (0.24 to 0.60)"),
    ([-0.2, -0.4, -0.6, -0.5, -0.4], "A is better by 0.42 (0.24 to 0.60)"),
    ([-0.2, 0.4, 0.6, -0.1, 0.3], f"{UNTOLD}B by 0.20 (-0.22 to 0.62); about 20 more pairs are needed"),
    ([-0.2, 0.2, 0.2, -0.2, 1e-5], f"{UNTOLD}B by 0.00 (-0.25 to 0.25); more than 10000 pairs would be needed"),
    ([0.3], f"{UNTOLD}0.3 in 1 pairs {NO_SPREAD}"),
    ([0.25, 0.25], f"{UNTOLD}0.25 in 2 pairs {NO_SPREAD}"),
]


def test_the_verdict_in_words():
    found = [verdict(estimate(differences), "pairs", "max", 1, "") for differences, _ in VERDICTS]
    assert found == [sentence for _, sentence in VERDICTS]


# The command.

SIDES = ("optimizer.lr=0.1", "optimizer.lr=0.2")


def test_configurations_are_paired_by_seed_and_by_fold_where_they_have_common_ones(tmp_path):
    a, b, c, s, f = (str(tmp_path / name) for name in "abcsf")
    make_sweep(s, 0.1, A)
    make_sweep(s, 0.2, B)
    lines = compare([s], *SIDES)
    assert [re.split("  +", line.strip()) for line in lines[:3]] == [
        ["runs", "val/accuracy", "95 %", "deviation"],
        ["A", "5", "0.922", "0.8981 to 0.9459", "0.019", "optimizer.lr=0.1"],
        ["B", "5", "0.942", "0.9258 to 0.9582", "0.013", "optimizer.lr=0.2"],
    ]
    low, high = stats.ttest_rel(B, A).confidence_interval()
    assert lines[3:] == ["paired by seed", f"B is better by 2.0 points ({100 * low:.1f} to {100 * high:.1f})"]
    assert compare([s], *SIDES[::-1])[-1] == lines[-1].replace("B", "A")
    for rate, values in ((0.1, A), (0.2, B)):
        for fold, value in enumerate(values):
            make_run(Path(f, f"{rate}-{fold}"), value, optimizer__lr=rate, loader__fold=fold, loader__folds=5)
    folds = compare([f], *SIDES)
    assert folds[3] == "paired by loader.fold"
    assert f"({100 * estimate(B_MINUS_A, rho=1 / 4).interval[0]:.1f} to" in folds[4]
    make_sweep(a, 0.1, [*A, float("nan")], tags=["x"], logging__level="a")  # what changes no number
    make_sweep(b, 0.1, B, first_seed=100)
    make_sweep(c, 0.1, B, first_seed=3)
    assert compare([a, b])[3:5] == ["A: 1 of 6 runs have not finished with a number, and are left out", "not paired"]
    assert compare([a, c])[4] == "paired by seed; 4 runs without a partner are left out"


def test_a_lower_loss_is_better_and_a_metric_of_the_test_can_be_asked_for(tmp_path):
    for rate, values in ((0.1, [0.5, 0.6, 0.7]), (0.2, [0.41, 0.5, 0.62])):
        for seed, loss in enumerate(values):
            test = {"step": 46, "metrics": {"loss": 2 * loss, "accuracy": 0.5 + loss / 9}}
            made = {"metric": ("val/loss", "min"), "test": test, "optimizer__lr": rate, "seed": seed}
            make_run(tmp_path / f"{rate}-{seed}", loss, **made)
    words = [str(tmp_path)], *SIDES
    assert compare(*words)[-1] == "B is better by 0.090 (0.065 to 0.115)"
    assert compare(*words, "test/loss")[-1] == "B is better by 0.180 (0.130 to 0.230)"
    assert compare(*words, "test/accuracy")[-1].startswith("A is better by 1.00 points (")
    with pytest.raises(ConfigError, match="has train/loss; type --metric val/loss"):
        compare(*words, "train/loss")


SIDES_NEEDED = "compare needs two folders, or folders with --a and --b; type python src/runs.py "
REFUSED = [  # folders, what is typed for both sides, the sentence
    ("s", (), SIDES_NEEDED),
    ("st", ("seed=1",), SIDES_NEEDED),
    ("sq", (), "q is no folder; type python src/runs.py table <a folder with runs>"),
    ("st", (), "s is more than one configuration: optimizer.lr=0.1 optimizer.lr=0.2; type python "),
    ("s", ("optimizer.lr=0.1", "optimizer.lr=3"), "no run for optimizer.lr=3; type "),
    ("s", ("seed=1", "optimizer.l=3"), "type --filter optimizer.lr=<value>"),
    ("ut", (), "u has two runs of one seed and fold, and one counts once"),
    ("ft", (), "no run of f has finished with a number; type python src/runs.py table to see why"),
]


def test_what_is_no_comparison_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, rate in (("s", 0.1), ("s", 0.2), ("t", 0.3), ("u/1", 0.3), ("u/2", 0.3)):
        make_sweep(folder, rate, B[:2])
    make_sweep("f", 0.3, [float("nan")])
    for folders, sides, sentence in REFUSED:
        with pytest.raises(ConfigError) as refused:
            compare([*folders], *sides)
        assert sentence in str(refused.value)


def make_tested(folder, right, data="90ab"):
    path = make_run(folder, sum(right) / len(right)) / "run.json"
    run = json.loads(path.read_text())
    path.write_text(json.dumps(run | {"data": run["data"] | {"test_data": data}}))
    rows = [f"{n},{'cat' if n % 2 else 'dog'}/{n}.png,{1 - hit / 2},{hit}" for n, hit in enumerate(right)]
    (folder / "test_samples.csv").write_text("\n".join(["number,file,loss,right", *rows, ""]))
    return str(folder)


def test_two_single_runs_are_paired_by_the_samples_of_their_test(tmp_path):
    right = [1] * 80 + [0] * 20
    a, b = make_tested(tmp_path / "a", right), make_tested(tmp_path / "b", [1] * 90 + [0] * 10)
    lines = compare([a, b])
    assert lines[3].startswith("paired by sample of the test set: about these two nets")
    low, high = of_differences([0.0] * 80 + [1.0] * 10 + [0.0] * 10).interval
    assert lines[4] == f"B is better by 10.0 points ({100 * low:.1f} to {100 * high:.1f})"
    assert compare([a, b], metric="val/accuracy")[-1] == lines[4]
    with pytest.raises(ConfigError, match="tested on other samples; type folders"):
        compare([a, make_tested(tmp_path / "c", right, data="other")])
    worst = [line.split() for line in samples_table(Path(a), 2)]
    assert worst[0] == ["number", "file", "loss", "right"]
    assert worst[1:] == [["80", "dog/80.png", "1.0000", "0"], ["81", "cat/81.png", "1.0000", "0"]]
    few, most = [line.split(maxsplit=4) for line in samples_table(Path(a), 2, "right")[1:]]
    assert few == ["0", "20", "1.0000", "0.0000", "0.0000 to 0.1611"]
    assert most == ["1", "80", "0.5000", "1.0000", "0.9542 to 1.0000"]
    with pytest.raises(ConfigError, match="the columns are number, file, loss, right; type --by right"):
        samples_table(Path(a), 2, "nope")
