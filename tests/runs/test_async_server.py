"""The asynchronous parameter server as a command."""

from typing import Any

import pytest

from support.event_files import scalars

pytestmark = pytest.mark.whole


def test_it_learns_from_gradients_that_are_stale(train: Any) -> None:
    options = ["strategy=async_parameter_server", "optimizer.momentum=0.5"]
    run = train("launch=torchrun", "launch.nproc_per_node=3", *options)
    shown = scalars(run.folder)
    accuracy = shown["test/accuracy"][-1][1]
    assert accuracy > 0.85
    assert [step for step, _ in shown["train/loss"]] == [23, 46, 69, 92, 115]  # the steps of a synchronous run
    assert accuracy * 360 == pytest.approx(round(accuracy * 360), abs=1e-3)  # of 360 test samples


def test_a_server_without_a_worker_is_refused_before_anything_starts(train: Any) -> None:
    refused = train("strategy=async_parameter_server", code=2)
    assert "type launch=spawn launch.nproc_per_node=3" in refused.sentence
