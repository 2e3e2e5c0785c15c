"""On a GPU what the ranks tell each other is read one exchange later. What depends on it is as without the delay."""

import csv
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import StoppedEarly
from lockstep.runs.record import read_run
from support.commands import ema
from support.configs import composed
from support.worlds import in_world, same_bits, train, train_all

SMALL = ["model=mlp", "trainer.epochs=3", "logging.every=5", "logger=[csv]", "snapshot.every=10steps"]


def delay() -> None:
    from lockstep.training import loop
    from lockstep.training.exchange import Exchange

    loop.Exchange = lambda *parts, delayed: Exchange(*parts, delayed=True)  # type: ignore[assignment,misc]


def train_delayed(configs: list[Any]) -> list[float | None]:
    delay()
    return train_all(configs)


def stop_in_step_30(cfg: Any) -> str:
    from lockstep.training.step import Step

    delay()
    update = Step.update

    def update_and_ask(step: Step) -> None:
        update(step)
        if step.progress.step == 30 and step.strategy.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Step.update = update_and_ask  # type: ignore[method-assign]
    with pytest.raises(StoppedEarly) as stopped:
        train(cfg)
    return str(stopped.value)


def rows(folder: Path) -> list[list[str]]:
    """What the loggers got of the training, times aside."""
    with (folder / "metrics.csv").open() as file:
        return [row for row in csv.reader(file) if "speed/" not in row[1]]


def test_logs_snapshots_and_weights_are_the_same(tmp_path: Path) -> None:
    at_once, later = (composed(*SMALL, f"run_dir={tmp_path / name}") for name in ("at_once", "later"))
    assert in_world(2, train_all, [at_once]) == in_world(2, train_delayed, [later])
    assert same_bits(tmp_path / "at_once", tmp_path / "later")
    assert rows(tmp_path / "at_once") == rows(tmp_path / "later")
    names = [sorted(path.name for path in (tmp_path / name / "snapshots").iterdir()) for name in ("at_once", "later")]
    assert names[0] == names[1]


def test_a_stop_and_a_limit_of_time_are_heard_by_all_ranks_at_one_step(tmp_path: Path) -> None:
    stopped, whole = (composed(*SMALL, f"run_dir={tmp_path / name}") for name in ("stopped", "whole"))
    first, second = in_world(2, stop_in_step_30, stopped)
    assert first == second
    assert "stopped early at step" in first
    in_world(2, train_delayed, [stopped])
    in_world(2, train_all, [whole])
    assert same_bits(tmp_path / "stopped", tmp_path / "whole")
    timed = composed(*SMALL, "trainer.epochs=100000", "trainer.max_time=2s", f"run_dir={tmp_path / 'timed'}")
    in_world(2, train_delayed, [timed])
    run = read_run(tmp_path / "timed")
    assert run["starts"][-1]["state"] == "finished"
    assert run["steps"] > 0


def stop_in_an_evaluation(cfg: Any) -> None:
    from lockstep.training import evaluate

    evaluate.signals = SimpleNamespace(stop_requested=lambda: True)  # type: ignore[assignment]
    with pytest.raises(StoppedEarly):
        train(cfg)


def test_a_run_that_is_stopped_in_an_evaluation_goes_on_with_its_own_weights(tmp_path: Path) -> None:
    """They are not the average, which an evaluation puts into their place."""
    stopped, whole = (composed(*SMALL, ema(0.9), f"run_dir={tmp_path / name}") for name in ("stopped", "whole"))
    in_world(1, stop_in_an_evaluation, stopped)
    in_world(1, train_all, [stopped, whole])
    assert same_bits(tmp_path / "stopped", tmp_path / "whole")
