"""A sweep over settings and seeds: its table, killed and resumed or not, and what reads its folder afterwards."""

import re
import signal
import sys
from pathlib import Path

import pytest
from scipy import stats

from lockstep.runs.record import read_run
from support.commands import PYTHON_TRAIN, ROOT, Command, wait_for
from support.event_files import Backend, scalars
from support.sweep_tables import column, rows_of, states

SWEEP = ["-m", "model=mlp", "trainer.epochs=1", "optimizer.lr=0.1,0.02", "seed=1,2,3", "hydra.sweep.dir=s"]
RUNS = [sys.executable, str(ROOT / "src" / "runs.py")]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command([*PYTHON_TRAIN, *SWEEP], tmp_path_factory.mktemp("undisturbed")).finish()


def summary(output: str) -> list[list[str]]:
    """The table and the lines below it, without seconds and paths."""
    lines = output[output.index("\nsweep: 6 finished") :].splitlines()
    table = [re.split("  +", re.sub(r"  \d+\.\d  ", "  ", line).strip()) for line in lines[2:11]]
    return [*table, *([line] for line in lines[11:] if line.startswith(("best:", "choosing:", "run it again:")))]


def test_the_summary_has_the_means_of_its_jobs(sweep: Command) -> None:
    values = list(map(float, column(sweep.cwd / "s", "objective")))
    first, second = summary(sweep.output)[1], summary(sweep.output)[5]
    for cells, jobs, words in ((first, values[:3], "optimizer.lr=0.1"), (second, values[3:], "optimizer.lr=0.02")):
        low, high = stats.t.interval(0.95, 2, sum(jobs) / 3, stats.sem(jobs))
        assert (cells[:2], cells[-1]) == (["3 jobs", "finished"], words)
        assert float(cells[2]) == pytest.approx(sum(jobs) / 3, abs=5e-3)
        assert list(map(float, cells[3].split(" to "))) == pytest.approx([low, high], abs=5e-3)
    again = [line for (line,) in summary(sweep.output)[9:] if line.startswith("run it again:")]
    assert again[0].endswith("model=mlp trainer.epochs=1 optimizer.lr=0.1 -m seed=1,2,3")


def test_a_killed_sweep_that_goes_on_has_the_same_table(sweep: Command, tmp_path: Path) -> None:
    run = Command([*PYTHON_TRAIN, *SWEEP], tmp_path)
    table = tmp_path / "s" / "sweep.csv"
    wait_for(lambda: table.exists() and states(table.parent)[2] == "running", "third job")
    run.send(signal.SIGKILL)
    run.process.wait()
    assert states(tmp_path / "s")[3:] == ["waiting"] * 3
    resumed = Command([*PYTHON_TRAIN, *SWEEP], tmp_path).finish()
    assert summary(resumed.output) == summary(sweep.output)
    for name in ("overrides", "objective", "best", "best_step", "test"):
        assert column(tmp_path / "s", name) == column(sweep.cwd / "s", name)


def test_tensorboard_shows_the_jobs_of_a_setting_as_one_row_with_their_mean(sweep: Command) -> None:
    rows = {row.hyperparameters["optimizer.lr"]: row for row in Backend(sweep.cwd).rows().values()}
    assert rows.keys() == {0.1, 0.02}
    objective = read_run(sweep.cwd / "s" / rows_of(sweep.cwd / "s")[0]["folder"])["objective"]["name"]
    last = [scalars(sweep.cwd / "s" / row["folder"])[objective][-1][1] for row in rows_of(sweep.cwd / "s")]
    assert rows[0.1].metrics[objective] == pytest.approx(sum(last[:3]) / 3)
    assert rows[0.02].metrics[objective] == pytest.approx(sum(last[3:]) / 3)
    assert "seed" not in rows[0.1].hyperparameters


def test_the_rows_can_be_compared_and_listed(sweep: Command) -> None:
    values = list(map(float, column(sweep.cwd / "s", "objective")))
    words = ["s", "optimizer.lr=0.1", "optimizer.lr=0.02"]
    found = Command([*RUNS, "compare", *words], sweep.cwd).finish().output.splitlines()
    assert found[3].startswith("paired by seed; ")
    low, high = stats.ttest_rel(values[:3], values[3:]).confidence_interval(0.95)
    assert found[4].startswith(
        "A is better by" if low > 0 else "B is better by" if high < 0 else "cannot be told apart"
    )
    listed = Command([*RUNS, "table", "s"], sweep.cwd).finish().output.splitlines()
    assert len(listed) == 3
    assert all("s (3 runs)" in line for line in listed[1:])
