"""run.json and `python src/runs.py table`: quick, grouped, sorted, filtered, one sentence for what cannot work."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime

import pytest

import lockstep
import runs as runs_py
from lockstep.errors import ConfigError
from lockstep.loggers.base import EpochSummary
from lockstep.runs.record import RunRecord, read_run, seconds_of, settle, state_of
from lockstep.runs.table import choosing, rows_of, settings
from support.commands import ROOT
from support.logged import run_info
from support.made_runs import make_run

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
    """cells(columns, *words) -> the rows of a table of these columns."""

    def made(columns, *words):
        lines, _ = runs("table", ".", "--columns", columns, *words)
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]

    return made


# The record.


def test_what_is_no_record_is_named(tmp_path):
    for content in (None, b"[]", b'{"format": 1, "starts": [{}]}', b'{"format": 2, "sta'):
        if content is not None:
            (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{tmp_path}/run.json is no record of a run \(.*; type "):
            read_run(tmp_path)


def test_a_run_of_a_process_that_is_gone_was_killed_and_one_elsewhere_is_unknown_after_an_hour(tmp_path):
    folder, here, child = make_run(tmp_path / "a", state="running"), socket.gethostname(), subprocess.Popen(["true"])
    child.wait()
    rows = [(here, os.getpid(), 0, "running"), (here, child.pid, 0, "killed")]
    for host, pid, seconds, state in [*rows, ("x", 1, 9, "running"), ("x", 1, 4e3, "unknown")]:
        run, now = read_run(folder), time.time() - seconds
        run["starts"][-1] |= {"hosts": [host], "pid": pid, "ended": now, "started": now - 5}
        (folder / "run.json").write_text(json.dumps(run))
        assert state_of(read_run(folder)) == state
        assert seconds_of(read_run(folder)) == pytest.approx(5, abs=1)


def test_a_run_that_is_killed_before_its_first_snapshot_keeps_its_start_and_a_long_history_stays_short(tmp_path):
    for epochs in (1, 2):
        settle(tmp_path)
        record = RunRecord(tmp_path, ("val/loss", "min"))
        record.start(run_info(tmp_path, start=START, config={"epochs": epochs}))
        record.progress.best, record.progress.best_step = 0.5, 20
        metrics = {"train": {"loss": 1.0}, "val": {"loss": 0.5}, "best": {"loss": 0.5}}
        record.epoch(EpochSummary(1, 2, 20, metrics, {"samples": 9.0}))
    test = {"step": 20, "metrics": {"loss": 0.0}}
    record.end(replace(run_info(tmp_path), last={"loss": 0.5}, test=test), "finished")
    run = read_run(tmp_path)
    assert [(one["state"], one["to_step"]) for one in run["starts"]] == [("killed", 0), ("finished", 20)]
    assert run["starts"][0]["config"] == {"epochs": 1}  # what the next start has changed
    values = {"speed/samples_per_s": 9.0, "train/loss": 1.0, "val/loss": 0.5, "best/loss": 0.5}
    assert run["history"] == [{"epoch": 1, "step": 20, **values}]
    assert run["objective"] == {"name": "val/loss", "mode": "min", "best": 0.5, "step": 20, "last": 0.5}
    record.start(run_info(tmp_path, 10, start=START))
    assert [one["to_step"] for one in read_run(tmp_path)["starts"]] == [0, 10, 10]
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
        assert (lines, error.count("\n"), error[:10]) == ([], 1, "lockstep: "), words
        assert error.strip().endswith(sentence)


def test_a_diff_names_what_two_runs_differ_in(tmp_path, runs):
    make_run(tmp_path / "a", seed=1, run_dir="a")
    path = make_run(tmp_path / "b", seed=1, run_dir="b", optimizer__lr=0.2) / "run.json"
    path.write_text(path.read_text().replace("2.14.1", "2.15.0"))
    found = [line.split() for line in runs("diff", "a", "b")[0]]
    assert found == [["a", "b"], ["optimizer.lr", "0.1", "0.2"], ["environment:", "torch", "2.14.1", "2.15.0"]]
    assert runs("diff", "a", "a")[0] == ["the same: config, data, code and environment"]
