"""A sweep over settings and seeds: its table, killed and resumed or not, and what reads its folder afterwards."""

import re
import signal

import pytest
from scipy import stats

from support.commands import PYTHON_TRAIN, wait_for
from support.sweep_tables import objectives, states

SWEEP = ["-m", "model=mlp", "trainer.epochs=1", "optimizer.lr=0.1,0.02", "seed=1,2,3"]


def end_of(output, name):
    """The table and the lines below it, without seconds and paths."""
    lines = output[output.index("\nsweep: 6 finished") :].replace(f" {name} (3 ", " x (3 ").splitlines()[2:]
    rows = [re.split(r"  +", line) for line in lines if not line.startswith("curves:")]
    place = rows[0].index("seconds")
    return ["  ".join(row[:place] + row[place + 1 :] if row[0] in ("state", "finished") else row) for row in rows]


def test_the_end_has_the_means_of_its_jobs_and_a_killed_sweep_that_goes_on_has_the_same(start, tmp_path):
    output = start(*PYTHON_TRAIN, *SWEEP, "hydra.sweep.dir=whole").finish().output
    whole, end = objectives(tmp_path / "whole"), end_of(output, "whole")
    for line, rate in ((end[1], "0.1"), (end[2], "0.02")):
        values = [value for name, value in sorted(whole.items()) if f"lr={rate}," in name]
        low, high = stats.t.interval(0.95, 2, sum(values) / 3, stats.sem(values))
        mean, half = map(float, re.findall(r"^finished +([\d.]+) ± ([\d.]+) ", line)[0])
        assert mean == pytest.approx(sum(values) / 3, abs=5e-5)
        assert half == pytest.approx((high - low) / 2, rel=5e-2)
        assert f" {rate} " in line
        assert line.endswith("1,2,3  x (3 runs)")
    assert "best:  optimizer.lr=0.1" in end
    run = start(*PYTHON_TRAIN, *SWEEP, "hydra.sweep.dir=s")
    wait_for((tmp_path / "s" / "optimizer.lr=0.1,seed=3" / "run.json").exists, "third job")
    run.send(signal.SIGKILL)
    run.process.wait()
    assert len(states(tmp_path / "s")) == 3
    resumed = start(*PYTHON_TRAIN, *SWEEP, "hydra.sweep.dir=s").finish()
    assert end_of(resumed.output, "s") == end
    assert objectives(tmp_path / "s") == whole
