"""`python src/runs.py table`: quick, sorted, filtered, and one sentence for what cannot work."""

import json
import re
import resource
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lockstep.runs.record import code_facts
from support.commands import ROOT
from support.made_runs import make_run

RUNS = str(ROOT / "src" / "runs.py")


def runs(folder: Path, *words: str, code: int = 0) -> tuple[list[str], str]:
    """(lines, what went to stderr) of `python src/runs.py <words>` in `folder`."""
    ended = subprocess.run([sys.executable, RUNS, *words], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout.splitlines(), ended.stderr


def test_a_thousand_runs_take_less_than_a_second_and_no_torch(tmp_path: Path) -> None:
    for number in range(1000):
        folder = tmp_path / "outputs" / f"2026-11-{number // 50:02}" / f"{number:04}"
        make_run(folder, number / 1000, optimizer__lr=0.1 if number % 2 else 0.2)
    runs(tmp_path, "table", "outputs/2026-11-00")  # the first start also compiles the modules
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines, _ = runs(tmp_path, "table", "--sort", "objective", "--filter", "optimizer.lr=0.20")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1  # 0.2 s on a 2 GHz core
    assert lines[0].split("  ")[-2:] == ["samples/s", "changed"]
    assert len(lines) == 501
    assert (
        "outputs/2026-11-19/0998  finished              0.9980       46     46       5709  optimizer.lr=0.2" in lines[1]
    )
    assert "2026-11-00/0000" in lines[-1]
    command = [sys.executable, "-X", "importtime", RUNS, "table", "outputs/2026-11-00"]
    loaded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr
    assert not {"torch", "hydra", "omegaconf"} & {line.split("|")[-1].strip() for line in loaded.splitlines()}


def test_columns_and_orders(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 0.5, seed=3, trainer__epochs=20)
    make_run(tmp_path / "b", None, "failed", seed=1, trainer__epochs=3)
    make_run(tmp_path / "c" / "0", 0.75, seed=2)
    (tmp_path / "c" / "1").mkdir()
    (tmp_path / "c" / "1" / "run.json").write_text('{"format": 1, "li')
    lines, problem = runs(tmp_path, "table", ".", "--columns", "run,objective,trainer.epochs,dataset.mean,commit")
    assert lines[0].split() == ["run", "best", "test/accuracy", "trainer.epochs", "dataset.mean", "commit"]
    assert lines[2].split() == ["b", "-", "3", "[0.5]", "59029b0b3e"]
    assert "c/1/run.json cannot be read: it is no JSON; type rm" in problem

    def order(*words: str) -> list[str]:
        return [line.strip() for line in runs(tmp_path, "table", "a", "b", "c/0", "--columns", "run", *words)[0][1:]]

    assert order("--sort", "objective") == ["c/0", "a", "b"]
    assert order("--sort", "objective", "--reverse") == ["a", "c/0", "b"]
    assert order("--sort", "trainer.epochs") == ["b", "c/0", "a"]
    assert order("--sort", "seed", "--filter", "state=finished") == ["c/0", "a"]
    assert order("--filter", "trainer.compile=false", "--filter", "seed=1") == ["b"]
    for shown in ("run=./a", f"run={tmp_path / 'a'}", "objective=0.5000", "objective=0.5"):
        assert order("--filter", shown) == ["a"]
    date = datetime.fromtimestamp(1795354012.7)
    for shown in (
        f"date={date:%Y-%m-%d}",
        f"date={date:%Y-%m-%d %H:%M}",
        "commit=59029b0b3e",
        "speed=5709",
        "steps=46",
    ):
        assert len(order("--filter", shown)) == 3


def test_runs_of_different_metrics_are_not_sorted_into_one_another(tmp_path: Path) -> None:
    for name, best in (("a", 0.1), ("b", 0.9), ("c", 0.5)):
        path = make_run(tmp_path / name, best) / "run.json"
        if name == "c":
            path.write_text(path.read_text().replace("test/accuracy", "test/loss").replace('"max"', '"min"'))
    lines, _ = runs(tmp_path, "table", ".", "--sort", "objective", "--columns", "run,objective")
    assert [line.split() for line in lines] == [
        ["run", "objective"],
        ["b", "test/accuracy", "0.9000"],
        ["a", "test/accuracy", "0.1000"],
        ["c", "test/loss", "0.5000"],
    ]


def test_runs_that_differ_only_in_seed_are_one_line(tmp_path: Path) -> None:
    """Those of one folder and one code. A second run of a seed, and a failed one, add nothing to the mean."""
    for seed, best in enumerate((0.5, 0.6, 0.7), 1):
        make_run(tmp_path / "s" / f"0.1-{seed}", best, optimizer__lr=0.1, seed=seed)
        path = make_run(tmp_path / "s" / f"0.2-{seed}", best + 0.2, optimizer__lr=0.2, seed=seed) / "run.json"
        run = json.loads(path.read_text()) | {"test": {"step": 46, "metrics": {"accuracy": best}}}
        run["objective"]["name"] = "val/accuracy"
        path.write_text(json.dumps(run))
    make_run(tmp_path / "s" / "0.1-again", 0.5, optimizer__lr=0.1, seed=1)
    make_run(tmp_path / "s" / "0.1-failed", None, "failed", optimizer__lr=0.1, seed=9)
    make_run(tmp_path / "other", 0.1, optimizer__lr=0.1, seed=7)
    columns = ["--columns", "run,state,objective,test,seed,changed"]
    lines, _ = runs(tmp_path, "table", "s", "--sort", "objective", *columns)
    assert [re.split("  +", line.strip()) for line in lines] == [
        ["run", "state", "objective", "test", "seed", "changed"],
        ["s (4 runs)", "3 finished, 1 failed", "test/accuracy 0.6000 ± 0.25 of 3", "-", "1,2,3,9", "optimizer.lr=0.1"],
        ["s/0.1-again", "finished", "test/accuracy 0.5000", "-", "1", "optimizer.lr=0.1 seed=1"],
        ["s (3 runs)", "finished", "val/accuracy 0.8000 ± 0.25", "0.6000 ± 0.25", "1,2,3", "optimizer.lr=0.2"],
    ]
    lines, _ = runs(tmp_path, "table", "s", "--filter", "optimizer.lr=0.2")
    assert lines[0].split()[4:8] == ["val/accuracy", "test/accuracy", "at", "step"]
    assert len(runs(tmp_path, "table", "s", "--each")[0]) == 9
    lines, _ = runs(tmp_path, "table", ".", "--filter", "optimizer.lr=0.1", "--columns", "run,objective")
    assert [line.split()[0] for line in lines[1:]].count("other") == 1  # another folder
    assert "test" not in runs(tmp_path, "table", "other")[0][0].split()
    for fold, best in enumerate((0.5, 0.6, 0.7)):
        make_run(tmp_path / "folds" / str(fold), best, dataset__folds=3, dataset__fold=fold)
    assert "0.6000 ± 0.39" in runs(tmp_path, "table", "folds")[0][1]  # wider than 0.25: folds share samples


def test_links_and_damaged_records_cost_a_table_no_run(tmp_path: Path) -> None:
    """Records that are JSON, and lack what a table shows."""
    make_run(tmp_path / "o" / "good")
    (tmp_path / "o" / "loop").symlink_to(tmp_path / "o")
    (tmp_path / "o" / "itself").symlink_to(tmp_path / "o" / "itself")
    bad: dict[str, Any] = {"objective": {}, "lives": [{}], "cwd": None, "flags": 1, "samples_per_second": "fast"}
    for number, (key, value) in enumerate(bad.items()):
        path = make_run(tmp_path / "o" / f"bad{number}") / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    lines, problems = runs(tmp_path, "table", "o", "--columns", "run,objective,speed")
    assert [line.split()[0] for line in lines[1:]] == ["o/good"]
    assert problems.count("run.json is no record of format 1; type rm") == len(bad)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "VERB; type python src/runs.py --help"),
        (["tabel"], "type python src/runs.py --help"),
        (["table", "--sorted"], "unrecognized arguments: --sorted; type python src/runs.py --help"),
        (["table"], "outputs is no folder; type python src/runs.py table <a folder with runs>"),
        (["table", "empty"], "no run below empty; type python src/runs.py table <another folder>"),
        (["table", "a", "--sort", "optimizer.l"], "type --sort optimizer.lr"),
        (["table", "a", "--columns", "run,,seed"], "type --columns objective"),
        (["table", "a", "--filter", "seed"], "--filter seed has no value; type --filter seed=<value>"),
        (["table", "a", "--filter", "seeds=1"], "type --filter seed=<value>"),
        (["table", "a", "--filter", "seed=7"], "none of 1 runs has seed=7; type another --filter"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    make_run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    lines, error = runs(tmp_path, *words, code=2)
    assert lines == []
    assert error.startswith("lockstep: ")
    assert error.count("\n") == 1
    assert error.strip().endswith(sentence)


def test_the_code_is_known_with_git_and_without(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    source = tmp_path / "src" / "train.py"
    for path in (source, tmp_path / "conf" / "config.yaml"):
        path.parent.mkdir()
        path.write_text("seed: 0\n")
    (tmp_path / "README.md").write_text("one\n")
    facts, diff = code_facts(tmp_path)
    without_git = facts["source"]
    assert "commit" not in facts
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "README.md").write_text("two\n")
    facts, diff = code_facts(tmp_path)
    assert len(facts["commit"]) == 40
    assert (facts["source"], facts["untracked"], diff) == (without_git, [], b"")
    source.write_text("seed: 1\n")
    (tmp_path / "src" / "new.py").write_text("")
    facts, diff = code_facts(tmp_path)
    assert facts["source"] != without_git
    assert facts["untracked"] == ["src/new.py"]
    assert facts["diff_bytes"] == len(diff)
    assert b"-seed: 0\n+seed: 1\n" in diff
    source.write_text("seed: 1\n" * 100_000)
    facts, diff = code_facts(tmp_path)
    assert facts["diff_bytes"] > 800_000
    assert diff == b""


def test_the_option_of_a_group_is_found_by_its_class(tmp_path: Path) -> None:
    make_run(tmp_path / "a", model___target_="lockstep.models.tutorial.mlp", model__tied="false")
    _, problems = runs(tmp_path, "table", "a", "--filter", "model=mlp", code=2)
    assert problems.rstrip().endswith("type --filter model._target_=<value>")
