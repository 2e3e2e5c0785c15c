"""A sweep over settings and seeds: its table, killed and resumed or not, and what reads its folder afterwards."""

import re
import signal
from pathlib import Path

import pytest
from scipy import stats

from support.commands import PYTHON_TRAIN, Command, wait_for
from support.sweep_tables import objectives, states

SWEEP = ["-m", "model=mlp", "trainer.epochs=1", "optimizer.lr=0.1,0.02", "seed=1,2,3", "hydra.sweep.dir=s"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command([*PYTHON_TRAIN, *SWEEP], tmp_path_factory.mktemp("undisturbed")).finish()


def end_of(output: str) -> list[str]:
    """The table and the lines below it, without seconds and paths."""
    lines = output[output.index("\nsweep: 6 finished") :].splitlines()[2:]
    rows = [re.split(r"  +", line) for line in lines if not line.startswith("curves:")]
    place = rows[0].index("seconds")
    return ["  ".join(row[:place] + row[place + 1 :] if row[0] in ("state", "finished") else row) for row in rows]


def of(sweep: Command, rate: str) -> list[float]:
    """The objectives of a learning rate, by seed."""
    return [value or 0.0 for name, value in sorted(objectives(sweep.cwd / "s").items()) if f"lr={rate}," in name]


def test_the_end_has_the_means_of_its_jobs(sweep: Command) -> None:
    first, second = end_of(sweep.output)[1:3]
    for line, rate in ((first, "0.1"), (second, "0.02")):
        values = of(sweep, rate)
        low, high = stats.t.interval(0.95, 2, sum(values) / 3, stats.sem(values))
        mean, half = map(float, re.findall(r"^finished +([\d.]+) ± ([\d.]+) ", line)[0])
        assert mean == pytest.approx(sum(values) / 3, abs=5e-5)
        assert half == pytest.approx((high - low) / 2, rel=5e-2)
        assert f" {rate} " in line
        assert line.endswith("1,2,3  s (3 runs)")
    assert "best:  optimizer.lr=0.1" in end_of(sweep.output)


def test_a_killed_sweep_that_goes_on_has_the_same_end(sweep: Command, tmp_path: Path) -> None:
    run = Command([*PYTHON_TRAIN, *SWEEP], tmp_path)
    wait_for((tmp_path / "s" / "optimizer.lr=0.1,seed=3" / "run.json").exists, "third job")
    run.send(signal.SIGKILL)
    run.process.wait()
    assert len(states(tmp_path / "s")) == 3
    resumed = Command([*PYTHON_TRAIN, *SWEEP], tmp_path).finish()
    assert end_of(resumed.output) == end_of(sweep.output)
    assert objectives(tmp_path / "s") == objectives(sweep.cwd / "s")
