"""`python src/runs.py compare`: two settings, their difference with its interval, and the verdict in words."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lockstep.runs.difference import compare, verdict
from lockstep.runs.repeats import Estimate, estimate, paired
from support.commands import ROOT
from support.made_runs import make_run

A, B = [0.91, 0.93, 0.92, 0.95, 0.9], [0.93, 0.94, 0.95, 0.96, 0.93]


def make_sweep(folder: Path, rate: float, values: Sequence[float], first_seed: int = 1, **changes: Any) -> None:
    """Runs with the seeds from `first_seed` on. A value of nan: the run has failed."""
    for seed, value in enumerate(values, first_seed):
        state, best = ("failed", None) if value != value else ("finished", value)
        make_run(folder / f"{rate}-{seed}", best, state, optimizer__lr=rate, seed=seed, **changes)


def lines_of(folder: Path, *words: str, code: int = 0) -> list[str]:
    command = [sys.executable, str(ROOT / "src" / "runs.py"), "compare", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return (ended.stdout if code == 0 else ended.stderr).splitlines()


def test_two_rows_of_a_sweep_are_paired_by_seed(tmp_path: Path) -> None:
    make_sweep(tmp_path / "s", 0.1, A)
    make_sweep(tmp_path / "s", 0.2, B)
    lines = lines_of(tmp_path, "s", "optimizer.lr=0.1", "optimizer.lr=0.2")
    assert [re.split("  +", line.strip()) for line in lines[:3]] == [
        ["runs", "test/accuracy", "95 %", "deviation"],
        ["A", "5", "0.922", "0.898 to 0.946", "0.019", "optimizer.lr=0.1"],
        ["B", "5", "0.942", "0.926 to 0.958", "0.013", "optimizer.lr=0.2"],
    ]
    low, high = stats.ttest_rel(B, A).confidence_interval(0.95)
    correlation = np.corrcoef(A, B)[0, 1]
    assert lines[3:] == [
        f"paired by seed; correlation of the 5 pairs {correlation:.2f}",
        f"B is better by 2.0 points ({100 * low:.1f} to {100 * high:.1f})",
    ]
    assert lines_of(tmp_path, "s/0.1-*", "s/0.2-*")[3:] == lines[3:]  # patterns, one for each side
    swapped = lines_of(tmp_path, "s", "optimizer.lr=0.2", "optimizer.lr=0.1", "--pair", "seed")
    assert swapped[-1] == lines[-1].replace("B", "A")
    low, high = stats.ttest_ind(B, A, equal_var=False).confidence_interval(0.95)
    assert low < 0
    unpaired = lines_of(tmp_path, "s", "optimizer.lr=0.1", "optimizer.lr=0.2", "--pair", "none")
    assert unpaired[3] == "not paired"
    assert re.fullmatch(
        r"cannot be told apart; with 5 runs a side a difference of 3.4 points would be seen; "
        r"about \d more runs a side are needed for 2",
        unpaired[4],
    )


def test_runs_without_common_seeds_are_not_paired_and_failed_ones_are_left_out(tmp_path: Path) -> None:
    make_sweep(tmp_path / "a", 0.1, [*A, float("nan")])
    make_sweep(tmp_path / "b", 0.1, B, first_seed=100)
    lines = lines_of(tmp_path, "a", "b")
    assert lines[3:5] == ["A: 1 of 6 runs have not finished with a number, and are left out", "not paired"]
    make_sweep(tmp_path / "c", 0.1, B, first_seed=3)
    lines = lines_of(tmp_path, "a", "c")
    assert lines[4].startswith("paired by seed; 4 runs without a partner are left out; correlation of the 3 pairs ")


def test_a_lower_loss_is_better_and_is_no_share(tmp_path: Path) -> None:
    for rate, values in ((0.1, [0.5, 0.6, 0.7]), (0.2, [0.41, 0.5, 0.62])):
        make_sweep(tmp_path, rate, values, task__metrics__loss="min")
    for path in tmp_path.glob("*/run.json"):
        run = json.loads(path.read_text())
        loss = run["objective"]["best"]
        run["objective"] |= {"name": "val/loss", "mode": "min"}
        path.write_text(
            json.dumps(run | {"test": {"step": 46, "metrics": {"loss": 2 * loss, "accuracy": 0.5 + loss / 9}}})
        )
    words = [".", "optimizer.lr=0.1", "optimizer.lr=0.2"]
    assert lines_of(tmp_path, *words)[-1] == "B is better by 0.090 (0.065 to 0.115)"
    assert lines_of(tmp_path, *words, "--metric", "test/loss")[-1] == "B is better by 0.180 (0.130 to 0.230)"
    # This task gives no direction for an accuracy: the lower one would be the better one.
    assert " points (" in lines_of(tmp_path, *words, "--metric", "test/accuracy")[-1]
    (problem,) = lines_of(tmp_path, *words, "--metric", "train/loss", code=2)
    assert problem.endswith(
        "keeps val/loss and the metrics of the test set; type --metric val/loss, or --metric test/loss"
    )
    (problem,) = lines_of(tmp_path, *words, "--metric", "test/f1", code=2)
    assert problem.endswith("has no such number of the test set; type --metric val/loss")


def test_folds_are_pairs_too_and_their_interval_is_wider(tmp_path: Path) -> None:
    for rate, values in ((0.1, A), (0.2, B)):
        for fold, value in enumerate(values):
            make_run(tmp_path / f"{rate}-{fold}", value, optimizer__lr=rate, loader__fold=fold, loader__folds=5)
    lines = lines_of(tmp_path, ".", "optimizer.lr=0.1", "optimizer.lr=0.2")
    assert lines[3].startswith("paired by loader.fold; ")
    found = paired(A, B, overlap=1 / 4)
    assert found.error == pytest.approx(stats.sem(np.subtract(B, A)) * np.sqrt(1 + 5 / 4))
    assert found.interval is not None
    assert "would be seen; " in lines[4] or f"({100 * found.interval[0]:.1f} to" in lines[4]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["s"], "compare needs two folders, or folders and two settings, and has 1 and 0; type python src/runs.py "),
        (
            ["s", "s", "optimizer.lr=0.1"],
            "compare needs two folders, or folders and two settings, and has 2 and 1; type",
        ),
        (["s", "q"], "q is no folder; type python src/runs.py table to see the runs below outputs"),
        (
            ["s", "t"],
            "s is more than one setting: its runs differ in optimizer.lr; "
            "type python src/runs.py compare s optimizer.lr=0.1 optimizer.lr=0.2",
        ),
        (
            ["s", "optimizer.lr=0.1", "optimizer.lr=3"],
            "no run for optimizer.lr=3; type python src/runs.py table s to see",
        ),
        (["s", "optimizer.lr=0.1", "optimizer.l=3"], "type --filter optimizer.lr=<value>"),
        (["t", "t", "--pair", "trainer.epochs"], "t has t/0.3-1 and t/0.3-2, both with trainer.epochs=5, and one run "),
        (
            ["t", "s", "--filter", "seed=1", "--filter", "optimizer.lr=0.3"],
            "no run for s; type python src/runs.py table",
        ),
        (["t/0.3-1", "t/0.3-2", "--pair", "seed"], "--pair seed: no run of A has a partner in B; type --pair none"),
        (["f", "t"], "no run of f has finished with a number; type python src/runs.py table to see why"),
    ],
    ids=" ".join,
)
def test_what_is_no_comparison_is_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    make_sweep(tmp_path / "s", 0.1, A[:2])
    make_sweep(tmp_path / "s", 0.2, B[:2])
    make_sweep(tmp_path / "t", 0.3, B[:2])
    make_sweep(tmp_path / "f", 0.3, [float("nan")])
    (line,) = lines_of(tmp_path, *words, code=2)
    assert line.startswith("lockstep: ")
    assert sentence in line


def test_what_follows_the_seed_and_what_changes_no_number_is_the_same_setting(tmp_path: Path) -> None:
    for seed, value in enumerate(A):
        follows = {"dataset__train__seed": seed, "logging__level": str(seed), "run_dir": str(seed)}
        make_run(tmp_path / "a" / str(seed), value, seed=seed, **follows)
        make_run(tmp_path / "b" / str(seed), value + 0.01 + seed / 1e4, seed=seed, **follows)
    assert compare([str(tmp_path / "a"), str(tmp_path / "b")], None, None, [])[-1].startswith("B is better by 1.0")


VERDICTS: dict[str, tuple[Estimate, str]] = {
    "better": (estimate([0.2, 0.4, 0.6, 0.5, 0.4]), "B is better by 0.42 (0.24 to 0.60)"),
    "worse": (estimate([-0.2, -0.4, -0.6, -0.5, -0.4]), "A is better by 0.42 (0.24 to 0.60)"),
    "unclear": (
        estimate([-0.2, 0.4, 0.6, -0.1, 0.3]),
        "cannot be told apart; with 5 pairs a difference of 0.57 would be seen; about 20 more pairs are needed for 0.2",
    ),
    "nothing": (
        estimate([-0.2, 0.2, 0.2, -0.2, 0.00001]),
        "cannot be told apart; with 5 pairs a difference of 0.34 would be seen; "
        "more than 10000 pairs would be needed for 2e-06",
    ),
    "one": (
        estimate([0.3]),
        "cannot be told apart: one run tells nothing about the spread; train both with seed=1,2,3,4,5",
    ),
    "same": (estimate([0.0, 0.0, 0.0]), "the same: the numbers of all 3 pairs are equal"),
    "by chance": (
        estimate([0.25, 0.25]),
        "cannot be told apart: 0.25 in all 2 pairs is no spread, which a metric of few samples gives by chance; "
        "train both with more seeds",
    ),
    "six": (estimate([0.25] * 6), "B is better by 0.25 in each of 6 pairs"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_in_words(name: str) -> None:
    difference, sentence = VERDICTS[name]
    assert verdict(difference, "pairs", "max", 1, "") == sentence


def test_equal_settings_are_told_apart_in_5_of_100() -> None:
    """And a difference of which `compare` says that it would be seen is seen in 80."""
    chance = np.random.default_rng(0)
    pairs = chance.normal(size=(2000, 5))
    claims = ["is better" in verdict(estimate(values.tolist()), "pairs", "max", 1, "") for values in pairs]
    assert np.mean(claims) == pytest.approx(0.05, abs=0.015)
    shift = 3.7610603 / np.sqrt(5)  # in standard deviations, for 5 pairs
    seen = [verdict(estimate((values + shift).tolist()), "pairs", "max", 1, "") for values in pairs]
    assert np.mean(["B is better" in sentence for sentence in seen]) == pytest.approx(0.8, abs=0.03)


def test_a_comparison_needs_no_torch(tmp_path: Path) -> None:
    make_sweep(tmp_path, 0.1, A)
    words = [".", "seed=1", "seed=2"]
    command = [sys.executable, "-X", "importtime", str(ROOT / "src" / "runs.py"), "compare", *words]
    loaded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr
    names = {line.split("|")[-1].strip() for line in loaded.splitlines()}
    assert not {"torch", "hydra", "omegaconf", "scipy.stats"} & names, shlex.join(command)
