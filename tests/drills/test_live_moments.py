"""launch.recover=live: ranks die at chosen moments, or beside a signal, and the run is as the undisturbed one."""

import csv
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from lockstep.errors import EXIT_STOPPED_WITHOUT_SNAPSHOT
from lockstep.runs.record import read_run
from support.commands import PYTHON_TRAIN, ROOT, Command, ranks_under, wait_for
from support.live_ranks import all_ranks
from support.run_folders import has_logged
from support.worlds import same_bits

pytestmark = pytest.mark.drill

DEATHS = "support.chosen_deaths"
TRAINING = [*PYTHON_TRAIN, "launch=fork", "launch.nproc_per_node=3", "launch.recover=live", "launch.replace_within=100"]
TRAINING += ["model=mlp", f"model._target_={DEATHS}.counting_mlp", "logger=[csv,console]", "trainer.deterministic=true"]


@pytest.fixture
def run_twice(start, tmp_path):
    """run_twice(*options) -> (folder of the undisturbed run, folder of the one in which ranks die)."""

    def run(*options: str) -> tuple[Path, Path]:
        for name, dies in (("undisturbed", {}), ("disturbed", {"DIES": 1})):
            words = [*TRAINING, "trainer.epochs=2", *options, f"hydra.run.dir={tmp_path / name}"]
            found = start(*words, PYTHONPATH=ROOT / "tests", **dies).finish()
        assert "takes its place" in found.output
        return tmp_path / "undisturbed", tmp_path / "disturbed"

    return run


def rows(folder: Path, tag: str) -> list[list[str]]:
    with (folder / "metrics.csv").open() as file:
        return [row for row in csv.reader(file) if row[1] == tag]


def test_a_second_death_before_the_next_step_loses_no_row_and_no_buffer(run_twice):
    undisturbed, disturbed = run_twice("+model.deaths=2")
    for tag in ("train/lr", "train/running_loss"):
        assert len(rows(undisturbed, tag)) > 1
        assert rows(disturbed, tag) == rows(undisturbed, tag)
    assert same_bits(undisturbed, disturbed)
    assert torch.load(disturbed / "model.pt", weights_only=True)["0.seen"] == 2 * 23


def test_an_evaluation_that_is_done_again_moves_the_plateau_once(run_twice):
    plateau = ["scheduler=plateau", "scheduler.patience=0", "scheduler.warmup_epochs=0"]
    undisturbed, disturbed = run_twice(*plateau, f"+logger.kills._target_={DEATHS}.KillsAfterEvaluation")
    assert rows(disturbed, "train/lr") == rows(undisturbed, "train/lr")
    assert same_bits(undisturbed, disturbed)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_last_snapshot_is_written_and_the_run_is_recorded_as_finished(run_twice, victim):
    kills = [f"+logger.kills._target_={DEATHS}.KillsInLastSave", f"+logger.kills.victim={victim}"]
    _, disturbed = run_twice(*kills)
    assert (disturbed / "snapshots" / "step_00000046.json").exists()
    assert read_run(disturbed)["lives"][-1]["state"] == "finished"


def test_a_broken_batch_is_skipped(start, tmp_path):
    data = [f"dataset.{part}._target_=support.damage.FloatDigits" for part in ("train", "test")]
    data += ["+dataset.train.broken=[100]", "+dataset.test.broken=[]", "dataset.mean=null", "dataset.std=null"]
    for how in ("live", "restart"):
        words = [*TRAINING, "watch.nan=skip", *data, "trainer.epochs=2", f"launch.recover={how}"]
        start(*words, f"hydra.run.dir={tmp_path / how}", PYTHONPATH=ROOT / "tests").finish()
    assert same_bits(tmp_path / "restart", tmp_path / "live")
    assert rows(tmp_path / "live", "train/loss") == rows(tmp_path / "restart", "train/loss")


def test_a_signal_ends_ranks_that_load_their_data(start, tmp_path):
    slow = [f"dataset.train._target_={DEATHS}.slow_digits", "hydra.run.dir=run"]
    run = start(*TRAINING, *slow, PYTHONPATH=ROOT / "tests")
    wait_for((tmp_path / "loading").exists, "rank that loads")
    time.sleep(0.5)
    run.send(signal.SIGTERM)
    run.finish(128 + signal.SIGTERM, limit=15)
    assert run.output.count("lockstep: ended by SIGTERM; there is nothing to save") == 1


def signal_one_and_kill_another(run: Command, folder: Path, number: int) -> None:
    wait_for(lambda: has_logged(folder, "epoch 2/"), "second epoch")
    one, other = all_ranks(run.process.pid)[:2]
    os.kill(one, number)
    os.kill(other, signal.SIGKILL)


@pytest.mark.parametrize("has_spare", [True, False])
def test_a_stop_beside_a_death_ends_the_run_at_once(start, tmp_path, has_spare):
    words = [*TRAINING, "dataset.train._target_=support.deaths.mortal_digits", "trainer.epochs=10000"]
    run = start(*words, "hydra.run.dir=run", PYTHONPATH=ROOT / "tests")
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 1/"), "first epoch")
    if not has_spare:
        (tmp_path / "no_memory").touch()
        for pid in set(ranks_under(run.process.pid)) - set(all_ranks(run.process.pid)):
            os.kill(pid, signal.SIGKILL)
    signal_one_and_kill_another(run, tmp_path / "run", signal.SIGTERM)
    run.finish(None, limit=15)
    assert run.process.returncode in (75, EXIT_STOPPED_WITHOUT_SNAPSHOT, 5)
    assert "the last good snapshot is" in run.output or run.process.returncode == 75


def test_a_rank_that_is_stopped_while_the_others_meet_is_named(start, tmp_path):
    run = start(*TRAINING, "trainer.epochs=10000", "backend.timeout=5", "hydra.run.dir=run", PYTHONPATH=ROOT / "tests")
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 1/"), "first epoch")
    stopped = all_ranks(run.process.pid)[0]
    signal_one_and_kill_another(run, tmp_path / "run", signal.SIGSTOP)
    run.finish(None, limit=60)
    assert run.process.returncode not in (0, 75)
    assert f"pid {stopped})" in next(line for line in run.output.splitlines() if "failed first" in line)
