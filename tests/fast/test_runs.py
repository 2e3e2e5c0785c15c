"""`python src/runs.py` and run.json: tables, comparisons, their formulas, one sentence for what cannot work; sweeps."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from scipy import special, stats

import lockstep
import runs as runs_py
from lockstep.errors import ConfigError
from lockstep.loggers.base import EpochSummary
from lockstep.runs.record import RunRecord, read_run
from lockstep.runs.stats import (
    estimate,
    is_share,
    of_differences,
    over_samples,
    pairs_for,
    samples_table,
    welch,
    wilson,
)
from lockstep.runs.table import choosing, compare, rho_of, row_of, rows_of, settings, verdict
from lockstep.sweeps.launch import divide_machine, folder_name
from support.commands import ROOT
from support.logged import run_info

with suppress(ImportError):  # an extra, which a fork may have deleted with its tests
    from lockstep.sweeps.search import distributions, overrides_of

# Folders with a run.json as a training writes it, made without a training.
SETTINGS = {"optimizer.lr": 0.1, "trainer.epochs": 5, "seed": 0, "dataset.mean": [0.5], "trainer.compile": False}
CODE = {"source": "baed35b7596fd0b6", "modules": {}, "commit": "59029b0b3e9e8f7448ae38e6eccc3a42518d3d6b"}
DATA = {"training_samples": 1437, "training_data": "cda99ef9", "test_samples": 360, "test_data": "90ab"}
SAME = {"format": 2, "command": "python src/train.py", "flags": [], "sweep": None, "notes": None}
SAME |= {"options": {"model": "mlp"}, "data": DATA, "code": CODE, "steps": 46}
SAME |= {"history": [{"epoch": 2, "step": 46, "speed/samples_per_s": 5709.4}]}
SAME |= {"environment": {"python": "3.11.7", "torch": "2.14.1", "device": "cpu"}}


ACCURACY, STARTED = ("val/accuracy", "max"), 1795354012.7


def make_run(folder, best=0.5, state="finished", metric=ACCURACY, test=None, tags=(), started=STARTED, **changes):
    """A run whose overrides are the keys of `changes`, with __ for a dot: optimizer__lr=0.2."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    start = {"world_size": 2, "launcher": "fork", "hosts": ["another"], "started": started, "ended": started + 86}
    start |= {"from_step": 0, "to_step": 46, "state": state, "exit_code": 0, "source": "baed", "pid": 1}
    objective = {"name": metric[0], "mode": metric[1], "best": best, "step": 46, "last": None}
    own = {"cwd": str(folder.parent), "tags": [*tags], "config": SETTINGS | changed, "test": test, "starts": [start]}
    if (fold := changes.get("loader__fold")) is not None:
        own["data"] = DATA | {"training_samples": 1436, "validation_samples": 359, "validation_data": str(fold)}
    overrides = ["launch=fork", *(f"{key}={value}" for key, value in changed.items())]
    folder.mkdir(parents=True)
    contents = SAME | own | {"objective": objective, "overrides": overrides}
    (folder / "run.json").write_text(json.dumps(contents, indent=1))
    return folder


START = {"world_size": 1, "launcher": "env", "hosts": [socket.gethostname()]}


@pytest.fixture
def runs(tmp_path, monkeypatch, capsys):
    """runs(*words) -> (lines, what went to stderr) of `python src/runs.py <words>` in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def made(*words, code=0):
        found, printed = runs_py.main([*words]), capsys.readouterr()
        assert found == code, printed
        return printed.out.splitlines(), printed.err

    return made


@pytest.fixture
def cells(runs):
    def made(columns, *words):
        lines, _ = runs("table", ".", "--columns", columns, *words)
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]

    return made


# The record.


def test_a_run_that_is_killed_before_its_first_snapshot_keeps_its_start_and_a_long_history_stays_short(tmp_path):
    for epochs in (1, 2):
        record, info = RunRecord(), run_info(tmp_path, start=START, config={"epochs": epochs})
        info.run.objective, info.run.direction = "val/loss", "min"
        record.start(info)
        record.progress.best, record.progress.best_step, record.progress.step = 0.5, 20, 20
        metrics = {"train": {"loss": 1.0}, "val": {"loss": 0.5}, "best": {"loss": 0.5}}
        record.epoch(EpochSummary(1, 2, 20, metrics, {"samples": 9.0}))
    test = {"step": 20, "metrics": {"loss": 0.0}}
    record.end(replace(run_info(tmp_path), last={"loss": 0.5}, test=test), "finished")
    run = read_run(tmp_path)
    assert [(one["state"], one["to_step"]) for one in run["starts"]] == [("killed", 20), ("finished", 20)]
    assert (run["steps"], row_of(run)["speed"]) == (20, 9.0)
    assert run["starts"][0]["config"] == {"epochs": 1}  # what the next start has changed
    values = {"speed/samples_per_s": 9.0, "train/loss": 1.0, "val/loss": 0.5, "best/loss": 0.5}
    assert run["history"] == [{"epoch": 1, "step": 20, **values}]
    assert run["objective"] == {"name": "val/loss", "mode": "min", "best": 0.5, "step": 20, "last": 0.5}
    record.start(run_info(tmp_path, 10, start=START))
    assert [one["to_step"] for one in read_run(tmp_path)["starts"]] == [20, 20, 10]
    assert read_run(tmp_path)["history"] == []
    for epoch in range(1, 5001):
        record.epoch(EpochSummary(epoch, 5000, epoch, {"val": {"loss": 1 / epoch}}, {"samples": 9.0}))
    record.end(run_info(tmp_path), "finished")
    epochs = [row["epoch"] for row in read_run(tmp_path)["history"]]
    assert (epochs, epochs[-1], 300 < len(epochs) <= 1000) == (sorted(epochs), 5000, True)


# The table.


def test_a_thousand_runs_take_a_second_or_two_and_no_torch(tmp_path, runs):
    for number in range(1000):
        folder = tmp_path / "outputs" / f"2026-11-{number // 50:02}" / f"{number:04}"
        make_run(folder, number / 1000, optimizer__lr=0.1 if number % 2 else 0.2, trainer__epochs=number)
    before = time.process_time()
    lines, _ = runs("table", "--sort", "objective", "--filter", "optimizer.lr=0.20")
    assert time.process_time() - before < 3
    assert lines[0].split()[-2:] == ["speed", "changed"]
    assert len(lines) == 501
    row = "outputs/2026-11-19/0998  finished             0.9980         46     46   5709  optimizer.lr=0.2 "
    assert row in lines[1]
    assert "2026-11-00/0000" in lines[-1]
    command = [sys.executable, "-X", "importtime", str(ROOT / "src" / "runs.py"), "table", "outputs/2026-11-00"]
    loaded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr.splitlines()
    names = {line.split("|")[-1].strip() for line in loaded}
    assert not {"torch", "hydra", "omegaconf", "scipy.stats", "pandas"} & names


def test_columns_orders_and_filters(tmp_path, runs, cells, caplog):
    make_run(tmp_path / "a", 0.5, seed=3, trainer__epochs=20, tags=["base", "x"])
    make_run(tmp_path / "b", None, "failed", seed=1, trainer__epochs=3)
    make_run(tmp_path / "c" / "0", 0.75, seed=2, note="a b", test={"step": 46, "metrics": {"accuracy": 0.0}})
    (tmp_path / "c" / "1").mkdir()
    (tmp_path / "c" / "1" / "run.json").write_text('{"format": 2, "sta')
    assert cells("run,objective,test,trainer.epochs,dataset.mean,commit", "--each") == [
        ["a", "0.5000", "-", "20", "[0.5]", "59029b0b3e"],
        ["b", "-", "-", "3", "[0.5]", "59029b0b3e"],
        ["c/0", "0.7500", "0 ± 0.0053", "5", "[0.5]", "59029b0b3e"],  # 0.0 is a number of a test
    ]
    assert "c/1/run.json is no record of a run (JSONDecodeError: " in caplog.text
    assert cells("changed", "--filter", "note=a b") == [["seed=2 'note=a b'"]]  # words of a shell
    date, filters = datetime.fromtimestamp(1795354012), ["--filter", "trainer.compile=false"]
    for words, order in (
        (["--sort", "objective"], ["c/0", "a", "b"]),
        (["--sort", "trainer.epochs"], ["b", "c/0", "a"]),
        (["--sort", "state"], ["b", "c/0", "a"]),
        (["--sort", "seed", "--filter", "state=finished"], ["c/0", "a"]),
        ([*filters, "--filter", "seed=1"], ["b"]),
        *([["--filter", shown], ["a"]] for shown in ("run=a", "objective=0.5000", "objective=0.5", "tags=base")),
        *([["--filter", shown], ["c/0", "a", "b"]] for shown in (f"date={date}", "commit=59029b0b3e", "steps=46")),
    ):
        assert [row for (row,) in cells("run", *words)] == order, words


def test_runs_of_different_metrics_are_not_sorted_into_one_another(tmp_path, cells):
    for name, best, metric in (("a", 0.1, "accuracy"), ("b", 0.9, "accuracy"), ("c", 0.5, "loss")):
        make_run(tmp_path / name, best, metric=(f"val/{metric}", "max" if metric == "accuracy" else "min"), x=name)
    found = cells("run,metric,objective", "--sort", "objective")
    assert found == [["b", "val/accuracy", "0.9000"], ["a", "val/accuracy", "0.1000"], ["c", "val/loss", "0.5000"]]
    assert choosing(settings(rows_of([tmp_path]))) == ""


def test_runs_that_differ_only_in_seed_or_fold_are_one_line(tmp_path, cells):
    """Those of one folder and one code. A second run of a seed, and a failed one, add nothing to the mean."""
    for seed, best in ((1, 0.5), (2, 0.6), (3, 0.7)):
        test = {"step": 46, "metrics": {"accuracy": best}, "samples": 100, "errors": {}}
        make_run(tmp_path / "s" / str(seed), best, optimizer__lr=0.2, seed=seed, test=test)
    make_run(tmp_path / "s" / "again", 0.1, optimizer__lr=0.2, seed=1, started=1795354013.0)
    make_run(tmp_path / "s" / "failed", None, "failed", optimizer__lr=0.2, seed=4)
    make_run(tmp_path / "s" / "other", 0.9, optimizer__lr=0.3, seed=1, model__seed=1)
    for fold in range(5):
        make_run(tmp_path / "f" / str(fold), 0.5 + fold / 10, loader__fold=fold, loader__folds=5, tags=[f"{fold}"])
    assert sorted(cells("run,state,objective,seed,changed")) == [
        ["f (5 runs)", "finished", "0.7000 ± 0.29", "0", "loader.folds=5"],  # 0.20 if they were independent
        ["s (4 runs)", "3 finished, 1 failed", "0.6000 ± 0.25 of 3", "1,2,3,4", "optimizer.lr=0.2"],
        ["s/again", "finished", "0.1000", "1", "optimizer.lr=0.2 seed=1"],
        ["s/other", "finished", "0.9000", "1", "optimizer.lr=0.3 seed=1 model.seed=1"],
    ]
    assert len(cells("run", "--each")) == 11
    sweep = settings([row for row in rows_of([tmp_path / "s"]) if row["seed"] < 4])
    assert [row["objective"] for row in sweep] == pytest.approx([0.9, 0.6, 0.1])
    told = "val/accuracy 0.6 is the best of 2, and so it is optimistic; test/accuracy 0.6 had no part in it"
    assert choosing(sweep[1:]) == f"{told} (95 %: 0.502 to 0.6906, from 100 test samples)"
    assert choosing(sweep).endswith("; the test set has not been read")


def test_python_gets_a_frame(tmp_path, monkeypatch):
    make_run(tmp_path / "outputs" / "a", optimizer__lr=0.2)
    monkeypatch.chdir(tmp_path)
    found = lockstep.runs().loc[0, ["run", "model", "optimizer.lr", "objective"]]
    assert found.tolist() == ["outputs/a", "mlp", 0.2, 0.5]
    assert lockstep.runs("outputs").equals(lockstep.runs())
    (tmp_path / "empty").mkdir()
    assert lockstep.runs("empty").empty
    with pytest.raises(ConfigError, match="nowhere is no folder; type "):
        lockstep.runs("nowhere")


BAD = {
    "table nowhere": "nowhere is no folder; type python src/runs.py table <a folder with runs>",
    "table empty": "no run below empty; type python src/runs.py table <another folder>",
    "table . --sort optimizer.lrr": "type --sort optimizer.lr",
    "table . --filter lr=0.1": "type --filter optimizer.lr=<value>",
    "table . --filter optimizer.lr": "type --filter optimizer.lr=<value>",
    "table . --filter optimizer=x": "type --filter optimizer._target_=<value>",
    "table . --columns obj": "type --columns state",
    "table . --filter seed=7": "none of 1 runs has seed=7; type another --filter",
    "diff a nowhere": "; type python src/runs.py table to see the runs below outputs",
    "samples a": "No such file or directory: 'a/test_samples.csv'",
}


def test_bad_input_is_one_sentence(tmp_path, runs):
    make_run(tmp_path / "a", optimizer___target_="torch.optim.SGD")
    (tmp_path / "empty").mkdir()
    for words, sentence in BAD.items():
        lines, error = runs(*words.split(), code=2)
        assert (lines, error.count("\n"), error.startswith("lockstep: ")) == ([], 1, True), words
        assert error.strip().endswith(sentence)


def test_a_diff_names_what_two_runs_differ_in(tmp_path, runs):
    make_run(tmp_path / "a", seed=1, run_dir="a")
    path = make_run(tmp_path / "b", seed=1, run_dir="b", optimizer__lr=0.2) / "run.json"
    path.write_text(path.read_text().replace("2.14.1", "2.15.0"))
    found = [line.split() for line in runs("diff", "a", "b")[0]]
    assert found == [["a", "b"], ["optimizer.lr", "0.1", "0.2"], ["environment:", "torch", "2.14.1", "2.15.0"]]
    assert runs("diff", "a", "a")[0] == ["the same: config, data, code and environment"]


A, B = [0.91, 0.93, 0.92, 0.95, 0.9], [0.93, 0.94, 0.95, 0.96, 0.93]
B_MINUS_A = [b - a for a, b in zip(A, B, strict=True)]


def make_sweep(folder, rate, values, first_seed=1, **changes):
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


def test_the_folder_of_a_job_says_what_it_changes():
    assert folder_name(["model=mlp", "optimizer.lr=0.1"]) == "model=mlp,optimizer.lr=0.1"
    assert [folder_name(["+model.kind=a"]), folder_name([])] == ["model.kind=a", "job"]
    assert folder_name(["model.name=../a b/c"]).startswith("model.name=..-a-b-c-")
    assert len(folder_name([f"model.name={'x' * 300}"])) <= 130
    assert len({folder_name([f"model.name={name}"]) for name in ("a b", "a-b", "a/b")}) == 3  # they look alike


def test_jobs_at_once_share_no_core_and_no_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [cores for cores, _ in divide_machine(3)] == [[0, 1], [2, 3], [4, 5]]
    assert divide_machine(1) == [([], [])]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [gpus for _, gpus in divide_machine(2)] == [["4", "5"], ["6", "7"]]
    assert [gpus for _, gpus in divide_machine(5)] == [["4"], ["5"], ["6"], ["7"], ["4"]]


MEANT = [
    ("lr=tag(log,interval(0.001,1))", FloatDistribution(0.001, 1.0, log=True)),
    ("lr=interval(0,1)", FloatDistribution(0, 1)),
    ("lr=int(interval(16,64))", IntDistribution(16, 64)),
    ("lr=tag(log,int(interval(16,64)))", IntDistribution(16, 64, log=True)),
    ("lr=range(1,8,3)", CategoricalDistribution(["1", "4", "7"])),
    ("lr=0.1,0.2", CategoricalDistribution(["0.1", "0.2"])),
    ("lr=choice(a,b,a)", CategoricalDistribution(["a", "b"])),
    ("+lr=range(0.5,2,0.5)", CategoricalDistribution(["0.5", "1.0", "1.5"])),
]


def test_what_the_overrides_of_a_search_mean():
    """Of a key typed twice the last value counts, and numbers have six digits."""
    parse = OverridesParser.create().parse_overrides
    for typed, meant in MEANT:
        fixed, space = distributions(parse(["model=mlp", "lr=3", typed]))
        assert fixed == (["model=mlp", "lr=3"] if typed.startswith("+") else ["model=mlp"])
        assert [*space.values()] == [meant]
        assert distributions(parse([typed, typed.partition("=")[0] + "=3"]))[1] == {}
    assert overrides_of({"lr": 1 / 3, "size": 16, "model": "a"}) == ["lr=0.333333", "size=16", "model=a"]
