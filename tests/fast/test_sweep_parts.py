"""The parts of a sweep that need no job: the table, the numbers and folders of jobs, slots, and the plot."""

import statistics
from pathlib import Path

import pytest
from PIL import Image

from lockstep.errors import ConfigError
from lockstep.source_code import is_project
from lockstep.sweeps import process
from lockstep.sweeps.process import divide_machine
from lockstep.sweeps.search import Job, JobList, add_jobs, folder_name, to_run
from lockstep.sweeps.summary import plot_sweep, print_summary, sorted_rows
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
    assert is_project(str(ROOT / "src" / "hydra_plugins" / "lockstep_sweeper.py"))
    assert is_project(str(ROOT / "src" / "lockstep" / "build_sweep.py"))
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
    assert not (tmp_path / "sweep.png").exists()


def test_the_plot_has_a_panel_for_each_parameter_and_marks_the_best(tmp_path: Path) -> None:
    rows = [
        Row(2 * i + j, f"optimizer.lr={rate} model={model} seed=3", "", "finished", i + j / 2)
        for i, rate in enumerate((0.001, 0.01, 0.1))
        for j, model in enumerate(("mlp", "convnet"))
    ]
    assert plot_sweep(tmp_path, rows, "test/accuracy", best=5)
    image = Image.open(tmp_path / "sweep.png")
    assert image.size == (840, 300)  # seed has one value, and so no panel
    colours = {colour for _, colour in image.convert("RGB").getcolors(100_000)}
    assert {(0x3B, 0x75, 0xAF), (0xD1, 0x49, 0x5B)} < colours
    assert not plot_sweep(tmp_path, rows[:1], "test/accuracy", best=0)


def test_the_plot_shows_jobs_that_a_search_has_pruned_or_paused_paler(tmp_path: Path) -> None:
    """Below the finished ones, at their last objective and the place of their parameter."""
    states = ["finished", "finished", "pruned", "waiting"]
    rows = [
        Row(number, f"optimizer.lr={rate}", "", state, objective)
        for number, (rate, objective, state) in enumerate(zip((1, 2, 3, 5), (1.0, 0.8, 0.0, 0.5), states, strict=True))
    ]
    rows.append(Row(4, "optimizer.lr=4", "", "waiting"))  # has not run yet
    assert plot_sweep(tmp_path, rows, "test/accuracy", best=0)
    image = Image.open(tmp_path / "sweep.png").convert("RGB")
    ((best, top),) = dots(image, (0xD1, 0x49, 0x5B))
    ((second, _),) = dots(image, (0x3B, 0x75, 0xAF))
    (pruned, floor), (paused, middle) = dots(image, (0xB3, 0xCB, 0xE2))
    assert best < second < pruned < paused
    assert paused - pruned == pytest.approx(2 * (pruned - second), abs=2)  # 3 to 5, and 2 to 3
    assert middle == pytest.approx((top + floor) / 2, abs=2)


def test_jobs_with_the_same_result_stand_beside_each_other(tmp_path: Path) -> None:
    rows = [Row(n, f"optimizer.lr={rate}", "", "finished", 0.5) for n, rate in enumerate((1, 1, 1, 2, 2))]
    assert plot_sweep(tmp_path, [*rows, Row(5, "optimizer.lr=3", "", "finished", 1.0)], "test/accuracy", best=5)
    places = dots(Image.open(tmp_path / "sweep.png").convert("RGB"), (0x3B, 0x75, 0xAF))
    assert len(places) == 5
    assert len({round(y) for _, y in places}) == 1


def dots(image: Image.Image, colour: tuple[int, int, int]) -> list[tuple[float, float]]:
    """The centres of the dots with this colour, from left to right. No two may overlap in x."""
    found = [(x, y) for x in range(image.width) for y in range(image.height) if image.getpixel((x, y)) == colour]
    columns = sorted({x for x, _ in found})
    starts = [x for x in columns if x - 1 not in columns]
    centres = []
    for start, following in zip(starts, [*starts[1:], image.width], strict=True):
        dot = [(x, y) for x, y in found if start <= x < following]
        centres.append((statistics.mean(x for x, _ in dot), statistics.mean(y for _, y in dot)))
    return centres
