"""Runs whose output nobody reads: they finish as others do."""

import shlex
import sys

import pytest

from support.commands import TORCHRUN, TRAIN
from support.sweep_tables import states


@pytest.mark.parametrize("launch", ["env", "fork", "torchrun"])
@pytest.mark.parametrize("output", [">&-", "| head -1", ">&- 2>&- <&-"])
def test_a_run_whose_output_is_closed_finishes_without_a_word(start, tmp_path, launch, output):
    words = f"{sys.executable} {TRAIN} model=mlp trainer.max_steps=12 launch={launch} hydra.run.dir=run"
    run = start("bash", "-o", "pipefail", "-c", f"{words} {output}").finish(0)
    lines = [line for line in run.output.splitlines() if line]
    assert [line for line in lines if not line.startswith("rank 0 of ")] == []
    assert "finished: test loss" in (tmp_path / "run/train.log").read_text()
    assert (tmp_path / "run/model.pt").exists()


@pytest.mark.parametrize(
    "starter",
    [
        f"{sys.executable} {TRAIN}",
        f"{sys.executable} {TRAIN} sweep.slots=2",
        f"{shlex.join(TORCHRUN)} --standalone {TRAIN}",
    ],
    ids=["one slot", "two slots", "torchrun"],
)
def test_a_sweep_whose_output_is_closed_runs_all_its_jobs(start, tmp_path, starter):
    words = f"{starter} -m seed=1,2 model=mlp trainer.max_steps=12 hydra.sweep.dir=s"
    run = start("bash", "-o", "pipefail", "-c", f"{words} | head -1").finish(0)
    assert "Traceback" not in run.output
    assert states(tmp_path / "s") == ["finished", "finished"]
