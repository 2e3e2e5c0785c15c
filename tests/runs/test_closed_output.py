"""Runs whose output nobody reads: they finish as others do."""

import pytest

from support.commands import TRAIN
from support.pages import environment
from support.sweep_tables import states


@pytest.mark.parametrize("launch", ["env", "fork"])
def test_a_run_whose_output_is_closed_finishes_without_a_word(start, tmp_path, launch):
    words = f"python {TRAIN} model=mlp trainer.max_steps=12 launch={launch} hydra.run.dir=run"
    run = start("bash", "-o", "pipefail", "-c", f"{words} | head -1", **environment(tmp_path)).finish(0)
    lines = [line for line in run.output.splitlines() if line]
    assert [line for line in lines if not line.startswith("rank 0 of ")] == []
    assert "finished: val loss" in (tmp_path / "run/train.log").read_text()
    assert (tmp_path / "run/model.pt").exists()


DIES_ONCE = """
import os

from lockstep.models.tutorial import mlp


def net(shape, classes):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("once")
    return mlp(shape, classes, width=16, depth=1, dropout=0.0)
"""


def test_a_run_whose_output_is_closed_restarts_as_others_do(start, tmp_path):
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    launch = "launch=torchrun launch.max_restarts=1 model=mlp model._target_=dies.net hydra.run.dir=run"
    words = f"python {TRAIN} {launch} trainer.max_steps=12"
    start("bash", "-o", "pipefail", "-c", f"{words} | true", PYTHONPATH=tmp_path, **environment(tmp_path)).finish(0)
    assert "finished: val loss" in (tmp_path / "run/train.log").read_text()


@pytest.mark.parametrize(("word", "code"), [("nope=1", 2), ("optimizer.lr=1e10", 1), ("model._target_=no.net", 2)])
def test_a_failure_whose_output_is_closed_has_the_exit_code_of_others(start, tmp_path, word, code):
    words = f"python {TRAIN} model=mlp trainer.epochs=1 {word}"
    start("bash", "-o", "pipefail", "-c", f"{words} |& true", **environment(tmp_path)).finish(code)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_sweep_whose_output_is_closed_runs_all_its_jobs(start, tmp_path, at_once):
    jobs = f"-m seed=1,2 hydra.launcher.n_jobs={at_once} hydra.sweep.dir=s"
    words = f"python {TRAIN} {jobs} model=mlp trainer.max_steps=12"
    run = start("bash", "-o", "pipefail", "-c", f"{words} | head -1", **environment(tmp_path)).finish(0)
    assert "Traceback" not in run.output
    assert list(states(tmp_path / "s").values()) == ["finished", "finished"]
