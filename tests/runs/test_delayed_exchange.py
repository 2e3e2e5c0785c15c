"""On a GPU what the ranks tell each other is read one exchange later. What depends on it is as without the delay."""

import os
import signal
from types import SimpleNamespace

import pytest

from lockstep.errors import StoppedEarly
from lockstep.runs.record import read_run
from support.commands import ema
from support.configs import composed
from support.logged import read_rows
from support.worlds import delay_exchanges, in_world, same_bits, train, train_all

SMALL = ["model=mlp", "trainer.epochs=3", "logging.every=5", "logger=[csv]", "snapshot.every=10steps"]


def train_delayed(configs):
    delay_exchanges()
    return train_all(configs)


def stop_in_step_30(cfg):
    from lockstep.training.step import Step

    delay_exchanges()
    update = Step.update

    def update_and_ask(step):
        update(step)
        if step.progress.step == 30 and step.strategy.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Step.update = update_and_ask
    with pytest.raises(StoppedEarly) as stopped:
        train(cfg)
    return str(stopped.value)


def test_what_ranks_tell_each_other_may_come_later_and_a_stop_is_heard_at_one_step(tmp_path):
    at_once, later, stopped = (composed(*SMALL, f"run_dir={tmp_path / name}") for name in ("whole", "later", "stopped"))
    in_world(2, train_all, [at_once])
    first, second = in_world(2, stop_in_step_30, stopped)
    assert first == second
    assert "stopped early at step" in first
    timed = composed(*SMALL, "trainer.epochs=100000", "trainer.max_time=2s", f"run_dir={tmp_path / 'timed'}")
    in_world(2, train_delayed, [stopped, later, timed])
    for other in ("later", "stopped"):
        assert same_bits(tmp_path / "whole", tmp_path / other)
    rows = [
        [row for row in read_rows(tmp_path / run) if "speed/" not in row[1]] for run in ("whole", "later", "stopped")
    ]
    assert rows[0] == rows[1] == rows[2]
    names = [sorted(path.name for path in (tmp_path / run / "snapshots").iterdir()) for run in ("whole", "later")]
    assert names[0] == names[1]
    run = read_run(tmp_path / "timed")
    assert (run["starts"][-1]["state"], run["steps"] > 0) == ("finished", True)


def stop_in_an_evaluation(cfg):
    from lockstep.training import evaluate

    evaluate.signals = SimpleNamespace(stop_requested=lambda: True)
    with pytest.raises(StoppedEarly):
        train(cfg)


def test_a_run_that_is_stopped_in_an_evaluation_goes_on_with_its_own_weights(tmp_path):
    """They are not the average, which an evaluation puts into their place."""
    stopped, whole = (composed(*SMALL, ema(0.9), f"run_dir={tmp_path / name}") for name in ("stopped", "whole"))
    in_world(1, stop_in_an_evaluation, stopped)
    in_world(1, train_all, [stopped, whole])
    assert same_bits(tmp_path / "stopped", tmp_path / "whole")
