"""The parts of a sweep that need no job: the table, the numbers and folders of jobs, slots, and the summary."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.runs.repeats import estimate, wilson
from lockstep.source_code import is_project
from lockstep.sweeps import process
from lockstep.sweeps.process import divide_machine
from lockstep.sweeps.search import Job, JobList, add_jobs, folder_name, to_run
from lockstep.sweeps.summary import cost_of_choosing, print_summary, settings_of, sorted_rows
from lockstep.sweeps.table import Row, SweepTable, read_table, state_after_kill
from support.commands import ROOT
from support.made_runs import make_run


def named(number: int, changed: str, overrides: object) -> str:
    return folder_name(number, changed)


def test_a_table_is_read_back_with_the_same_bits(tmp_path: Path) -> None:
    table = SweepTable(tmp_path)
    table.add([Row(0, "optimizer.lr=0.1 'model.name=a b'", "0"), Row(1, "seed=1", "1")])
    table.update(0, state="finished", objective=1 / 3, best=0.1 + 0.2, best_step=7, seconds=1.5)
    table.update(1, state="failed", cause='a "cause", with a comma\u2026')
    assert read_table(tmp_path) == list(SweepTable(tmp_path)) == list(table)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]
    older = [line.rpartition(",")[0] for line in (tmp_path / "sweep.csv").read_text().splitlines()]
    (tmp_path / "sweep.csv").write_text("\n".join(older))
    assert older[0].endswith("cause")  # a sweep that was begun before there was a column for the test set goes on
    assert read_table(tmp_path) == list(table)
    (tmp_path / "sweep.csv").write_text("number,state\n0,finished\n")
    with pytest.raises(ConfigError, match="is not the table of a sweep"):
        SweepTable(tmp_path)


def test_jobs_keep_their_numbers_and_new_ones_get_the_next(tmp_path: Path) -> None:
    table = SweepTable(tmp_path)
    fixed = {"trainer.epochs=2"}
    first = add_jobs(table, [["trainer.epochs=2", f"seed={seed}"] for seed in (1, 2, 1)], fixed, named)
    assert [job.number for job in first] == [0, 1, 2]
    assert first[0] == Job(0, ("trainer.epochs=2", "seed=1"))
    again = add_jobs(table, [["trainer.epochs=2", f"seed={seed}"] for seed in (3, 2)], fixed, named)
    assert [(job.number, table.rows[job.number].folder) for job in again] == [(3, "3_seed=3"), (1, "1_seed=2")]
    for number, state in enumerate(["finished", "failed", "stopped", "waiting"]):
        table.update(number, state=state)
    every = [Job(number, ()) for number in range(4)]
    assert [job.number for job in to_run(table, every, retry_failed=False)] == [2, 3]
    assert [job.number for job in to_run(table, every, retry_failed=True)] == [1, 2, 3]
    search = JobList(every[:1])
    assert (search.ask(), search.ask()) == (every[0], None)


@pytest.mark.parametrize(
    ("changed", "folder"),
    [
        ("optimizer.lr=0.1 model=mlp", "7_optimizer.lr=0.1+model=mlp"),
        ("+model.kind=a", "7_model.kind=a"),
        ("", "7"),
        ("'model.name=../a b/c'", "7_model.name=..-a-b-c"),
        (f"model.name={'x' * 300}", f"7_model.name={'x' * 300}"[:120]),
    ],
)
def test_the_folder_of_a_job_says_what_it_changes(changed: str, folder: str) -> None:
    assert folder_name(7, changed) == folder


def test_the_code_that_starts_a_sweep_is_no_code_of_the_user_s() -> None:
    assert is_project(str(ROOT / "src" / "hydra_plugins" / "lockstep.py"))
    assert is_project(str(ROOT / "src" / "lockstep" / "sweeps" / "build_sweep.py"))
    assert not is_project(str(ROOT / "tests" / "conftest.py"))


def test_slots_share_no_core_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: list(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [sorted(slot.cores) for slot in divide_machine(3, 1)] == [[0, 1], [2, 3], [4, 5]]
    assert [sorted(slot.cores) for slot in divide_machine("auto", 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(divide_machine("auto", "gpu")) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    devices = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in divide_machine("auto", 2)]
    assert devices == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="sweep.slots=5 is more than the 4 GPUs .* type sweep.slots=auto"):
        divide_machine(5, 1)
    with pytest.raises(ConfigError, match="sweep.slots=3 of 2 ranks each is more than the 4 GPUs"):
        divide_machine(3, 2)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in divide_machine(2, "gpu")] == ["4,5", "6,7"]


def test_a_container_with_one_gpu_of_several_names_it_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([folder / "nvidia3"]))
    assert process.visible_gpus() == ["0"]


@pytest.mark.parametrize(
    ("row", "is_submitted", "run", "state", "cause"),
    [
        ("running", True, "finished", "finished", ""),
        ("running", True, "paused", "stopped", ""),
        ("running", True, "diverged", "failed", "Slurm job 17 has ended, see slurm-17.out"),
        ("running", True, None, "failed", "Slurm job 17 has ended, see slurm-17.out"),
        ("stopped", True, "finished", "finished", ""),  # Slurm has started it again
        ("running", False, "finished", "stopped", "the sweep was killed"),
        ("running", False, None, "stopped", "the sweep was killed"),
        ("stopped", False, "stopped", "stopped", "as it was"),
    ],
)
def test_what_became_of_a_job_that_no_sweep_has_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    is_submitted: bool,
    run: str | None,
    state: str,
    cause: str,
) -> None:
    squeue = tmp_path / "squeue"  # the queue is empty
    squeue.write_text("#!/bin/sh\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folder = tmp_path / "0"
    if run is None:
        folder.mkdir()
    else:
        make_run(folder, state=run)
    if is_submitted:
        (folder / "slurm_job").write_text("17\n")
    known = Row(0, "seed=1", "0", row, cause="as it was")
    after = state_after_kill(known, folder)
    assert (after.get("state", known.state), after.get("cause", known.cause)) == (state, cause)


def test_the_best_row_comes_first_and_failures_last(tmp_path: Path) -> None:
    table = SweepTable(tmp_path)
    values = [("failed", None), ("finished", 0.5), ("finished", float("nan")), ("stopped", None), ("finished", 0.9)]
    table.add([Row(n, f"seed={n}", str(n), state, value) for n, (state, value) in enumerate(values)])
    assert [row.number for row in sorted_rows(table, "max")] == [4, 1, 2, 3, 0]
    assert [row.number for row in sorted_rows(table, "min")] == [1, 4, 2, 3, 0]


def repeated(values: Mapping[str, Sequence[float | None]], tests: Sequence[float] = ()) -> list[Row]:
    """Rows of settings that each have the seeds 1, 2, ...; a job without a value has failed."""
    rows: list[Row] = []
    for words, numbers in values.items():
        for seed, value in enumerate(numbers, 1):
            state = "failed" if value is None else "finished"
            row = Row(len(rows), f"{words} seed={seed}".strip(), str(len(rows)), state, value, seconds=1.0)
            row.test = tests[row.number] if tests else None
            rows.append(row)
    return rows


def test_jobs_that_differ_in_seed_or_fold_are_one_setting() -> None:
    rows = repeated({"optimizer.lr=0.1": [0.5, 0.7], "optimizer.lr=0.2": [0.8, 0.9, 0.7]})
    rows.append(Row(5, "+dataset.fold=1 optimizer.lr=0.1", "5", "finished", 0.6))
    best, other = settings_of(rows, "max")
    assert (best.overrides, [row.number for row in best.rows]) == ("optimizer.lr=0.2", [2, 3, 4])
    assert (other.overrides, [row.number for row in other.rows]) == ("optimizer.lr=0.1", [0, 1, 5])
    assert best.objective == estimate([0.8, 0.9, 0.7])
    assert [setting.overrides for setting in settings_of(rows, "min")] == ["optimizer.lr=0.1", "optimizer.lr=0.2"]


def test_folds_of_a_setting_share_samples_and_so_its_interval_is_wider() -> None:
    rows = [Row(n, f"dataset.fold={n}", str(n), "finished", n / 10, test=n / 5) for n in range(5)]
    runs = {n: {"config": {"dataset.folds": 5, "dataset.fold": n}} for n in range(5)}
    (setting,) = settings_of(rows, "max", runs)
    assert setting.objective == estimate([0.0, 0.1, 0.2, 0.3, 0.4], overlap=1 / 4)
    assert setting.test == estimate([0.0, 0.2, 0.4, 0.6, 0.8], overlap=1 / 4)


def test_a_setting_of_which_jobs_are_missing_is_not_the_best() -> None:
    """Its mean is that of the seeds that went well. Fewer seeds that all went well may be the best."""
    rows = repeated({"a=1": [0.5, 0.7], "a=2": [0.9, None], "a=3": [None, None], "a=4": [0.8]})
    assert [setting.overrides for setting in settings_of(rows, "max")] == ["a=4 seed=1", "a=1", "a=2", "a=3"]


def test_a_job_that_is_listed_twice_tells_nothing_new() -> None:
    rows = [Row(n, words, str(n), "finished", 0.5) for n, words in enumerate(["seed=1", "seed=1", "seed=2"])]
    assert [[row.number for row in setting.rows] for setting in settings_of(rows, "max")] == [[0, 2], [1]]


def printed(folder: Path, rows: list[Row], capsys: pytest.CaptureFixture[str], objective: str = "val/accuracy") -> str:
    table = SweepTable(folder)
    table.add(rows)
    for row in rows:
        record = make_run(folder / row.folder, row.objective) / "run.json"
        record.write_text(record.read_text().replace("test/accuracy", objective))
    print_summary(table, objective, "max", ["python", "src/train.py", "model=mlp"], [])
    return capsys.readouterr().out


def test_the_summary_has_a_row_for_each_setting_with_its_jobs_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = [0.48, 0.52, 0.62, 0.63, 0.64, 0.6]
    rows = repeated({"optimizer.lr=0.1": [0.5, 0.6], "optimizer.lr=0.2": [0.75, 0.76, 0.77], "a=1": [0.1]}, tests)
    rows += [Row(6, "a=2 seed=1", "6", "finished", 0.9), Row(7, "a=2 seed=2", "7", "failed", cause="killed")]
    shown = printed(tmp_path, rows, capsys)
    assert [re.split("  +", line.strip()) for line in shown.splitlines()[2:14]] == [
        ["job", "state", "val/accuracy", "95 %", "deviation", "test/accuracy", "seconds", "overrides"],
        ["3 jobs", "finished", "0.760", "0.735 to 0.785", "0.010", "0.630", "3.0", "optimizer.lr=0.2"],
        ["2", "finished", "0.75", "0.62", "1.0", "seed=1"],
        ["3", "finished", "0.76", "0.63", "1.0", "seed=2"],
        ["4", "finished", "0.77", "0.64", "1.0", "seed=3"],
        ["2 jobs, others 3", "finished", "0.550", "-0.085 to 1.185", "0.071", "0.500", "2.0", "optimizer.lr=0.1"],
        ["0", "finished", "0.5", "0.48", "1.0", "seed=1"],
        ["1", "finished", "0.6", "0.52", "1.0", "seed=2"],
        ["5", "finished", "0.1", "0.6", "1.0", "a=1 seed=1"],
        ["1 of 2 jobs", "0.900", "0.0", "a=2"],
        ["6", "finished", "0.9", "0.0", "seed=1"],
        ["7", "failed", "0.0", "seed=2", "killed"],
    ]
    assert "best:       optimizer.lr=0.2, by the mean of jobs 2, 3, 4\n" in shown
    low, high = wilson(0.63, 360)
    assert (
        "choosing:   val/accuracy 0.76 is the best of 4, and so it is optimistic; test/accuracy 0.63 had no part in it "
        f"(95 %: {low:.4g} to {high:.4g}, from 360 test samples)\n"
    ) in shown
    assert "run it again: python src/train.py model=mlp optimizer.lr=0.2 -m seed=1,2,3\n" in shown


@pytest.mark.parametrize(
    ("objective", "tests", "end"),
    [
        ("test/accuracy", [], "on the test set: test/accuracy 0.7 is the best of 2, and so it is optimistic"),
        (
            "val/accuracy",
            [],
            "val/accuracy 0.7 is the best of 2, and so it is optimistic; the test set has not been read",
        ),
        (
            "val/f1",
            [0.4, 0.5, 0.61, 0.63],
            "test/f1 0.62 had no part in it (95 %: 0.4929 to 0.7471, from 2 jobs)",
        ),
    ],
)
def test_what_choosing_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str, tests: list[float], end: str
) -> None:
    rows = repeated({"a=1": [0.4, 0.5], "a=2": [0.6, 0.8]}, tests)
    (line,) = [line for line in printed(tmp_path, rows, capsys, objective).splitlines() if line.startswith("choosing:")]
    assert line.endswith(end)


def test_the_test_number_of_one_job_stands_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(n, f"a={n}", str(n), "finished", 0.5 + n / 10, test=0.4 + n / 10) for n in range(2)]
    lines = printed(tmp_path, rows, capsys).splitlines()
    assert lines[2].split() == [
        "job",
        "state",
        "val/accuracy",
        "test/accuracy",
        "at",
        "step",
        "seconds",
        "overrides",
    ]
    assert lines[3].split()[:4] == ["1", "finished", "0.6", "0.5"]
    assert "had no part in it (95 %: 0.4486 to 0.5514, from 360 test samples)" in lines[6]


def test_many_settings_are_shown_without_their_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(tmp_path, repeated({f"a={n}": [0.5 + n / 100, 0.6] for n in range(20)}), capsys)
    assert shown.count("  2 jobs  finished") == 20
    assert "... and the single jobs in sweep.csv\n" in shown


def test_the_interval_of_the_test_number_covers_chance_where_labels_are_random() -> None:
    """Sixteen settings that can learn nothing, of which the best on the validation set is chosen, 1,000 times."""
    chance, classes, samples = np.random.default_rng(0), 10, 360
    optimistic, covered = 0, 0
    for _ in range(1000):
        settings = chance.binomial(samples, 1 / classes, size=(2, 16)) / samples  # of validation and test set
        rows = [Row(n, f"a={n}", str(n), "finished") for n in range(16)]
        for row, objective, test in zip(rows, *settings, strict=True):
            row.objective, row.test = float(objective), float(test)
        best = settings_of(rows, "max")[0]
        line = cost_of_choosing(best, 16, "val/accuracy", [{"data": {"test_samples": samples}}])
        low, high = map(float, re.findall(r"95 %: (\S+) to (\S+),", line)[0])
        covered += low <= 1 / classes <= high
        assert best.objective is not None
        optimistic += best.objective.mean > wilson(1 / classes, samples)[1]
    assert covered >= 900
    assert optimistic > 200  # where the interval of a single setting would have ended


def test_there_is_no_best_job_across_different_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = SweepTable(tmp_path)
    table.add([Row(number, f"seed={number}", str(number), "finished", 0.5 + number) for number in range(2)])
    for number, name in enumerate(("test/loss", "test/f1")):
        make_run(tmp_path / str(number))
        record = tmp_path / str(number) / "run.json"
        record.write_text(record.read_text().replace("test/accuracy", name))
    print_summary(table, "test/loss", "min", ["python", "src/train.py"], [])
    shown = capsys.readouterr().out
    assert [line.split()[2:4] for line in shown.splitlines()[3:5]] == [["test/loss", "0.5"], ["test/f1", "1.5"]]
    assert "best:       none, as the objectives are different metrics: test/f1, test/loss\n" in shown
    assert "run it again" not in shown
