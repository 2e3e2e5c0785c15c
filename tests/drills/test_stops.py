"""A wish to stop in an evaluation, and beside a rank that hangs: what is saved, what is said, how the run goes on."""

import os
import signal
from pathlib import Path

import pytest

from support.commands import STARTERS, ema, wait_for
from support.event_files import MEASURED, scalars
from support.phases import PARTS, in_phase
from support.run_folders import read_log, stopped_at
from support.worlds import same_bits

pytestmark = pytest.mark.drill

PATH = Path(__file__).parents[1]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve but the speed."""
    return {tag: points for tag, points in scalars(folder).items() if not tag.startswith(MEASURED)}


def test_a_signal_after_the_training_does_not_end_a_rank_that_closes_its_loggers(start, tmp_path):
    run = start(*STARTERS["launch=fork"], *PARTS, "trainer.max_steps=2", LINGER="end:8", PYTHONPATH=PATH)
    wait_for(lambda: in_phase(tmp_path, "end"), "the end of the training")
    os.kill(run.process.pid, signal.SIGTERM)
    assert "finished:" in run.finish(0).output


@pytest.mark.parametrize(
    ("starter", "limits"),
    [
        ("launch=torchrun", ["trainer.epochs=2"]),
        ("launch=fork", ["trainer.max_steps=6"]),
        ("python", ["trainer.epochs=1", ema(0.9), "snapshot.every=2steps"]),
    ],
)
def test_a_stop_in_an_evaluation_drops_it_and_a_resumed_run_repeats_it(start, tmp_path, starter, limits):
    command = [*STARTERS[starter], *PARTS, *limits, "evaluation.batch_size=2"]
    start(*command, "hydra.run.dir=whole", PYTHONPATH=PATH).finish()
    run = start(*command, LINGER="evaluation:0.5", PYTHONPATH=PATH)  # 8 s on two ranks
    wait_for(lambda: in_phase(tmp_path, "evaluation"), "evaluation")
    os.kill(run.process.pid, signal.SIGTERM)
    run.finish(75)
    step = stopped_at(tmp_path / "run")
    assert (tmp_path / f"run/snapshots/step_{step:08d}").exists()
    assert "val loss" not in run.output
    again = start(*command, PYTHONPATH=PATH).finish()
    assert f"epoch {2 if 'max_steps' in limits[0] else 1}/" in again.output
    first = next(line for line in again.output.splitlines() if line.startswith("epoch "))
    assert "samples/s" not in first  # this process has trained no step of it
    assert same_bits(tmp_path / "whole", tmp_path / "run")
    assert curves(tmp_path / "run") == curves(tmp_path / "whole")
    assert "finished:" in read_log(tmp_path / "run")
