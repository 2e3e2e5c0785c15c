"""strategy=data_parallel, model_parallel and async_parameter_server."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.strategies.one_process import UnevenDataParallel, part_places, rank_devices
from support.commands import ema
from support.configs import composed
from support.digits import PAIRS_ON_TEST
from support.event_files import scalars
from support.models import WithConstants
from support.worlds import distance, in_world, train, train_all, weights

SMALL = [
    "dataset=random",
    "dataset.samples=61",
    "model=mlp",
    "model.width=16",
    "trainer.precision=fp64",
    "trainer.batch_size=16",
]


def test_data_parallel_without_a_gpu_and_model_parallel_have_one_processes_numbers(tmp_path: Path) -> None:
    model = [*SMALL, "trainer.epochs=1", "logger=[]", "strategy.bucket_cap_mb=0.001"]
    alone = ["strategy=data_parallel", "~strategy.bucket_cap_mb"]
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'alone'}", *model)])
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'data_parallel'}", *model[:-1], alone[0])])
    in_world(2, train_all, [composed(f"run_dir={tmp_path / 'halves'}", *model, "strategy=model_parallel")])
    for name in ("data_parallel", "halves"):
        assert distance(weights(tmp_path / "alone"), weights(tmp_path / name)) < 1e-12


def devices_of(configs: list[Any]) -> list[int]:
    """Trainings in this rank -> over how many devices each strategy=model_parallel among them spread its model."""
    from lockstep.strategies import one_process

    found = []

    def noted(world: Any, count: int) -> list[torch.device]:
        found.append(count)
        return rank_devices(world, count)

    one_process.rank_devices = noted
    train_all(configs)
    return found


def test_layers_called_with_none_tuples_and_keywords_can_be_spread_over_devices(tmp_path: Path) -> None:
    model = [*SMALL[:2], "model=linear", "model._target_=support.models.Recurrent", "trainer.precision=fp64"]
    runs = {"whole": [], "spread": ["strategy=model_parallel", "strategy.devices=3"]}
    short = [*model, "trainer.max_steps=2", "logger=[]"]
    configs = [composed(f"run_dir={tmp_path / name}", *short, *more) for name, more in runs.items()]
    assert in_world(1, devices_of, configs) == [[3]]
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "spread")) == 0


@pytest.mark.parametrize(
    ("samples", "devices", "first_share", "sizes"),
    [(7, 1, 0.5, [7]), (9, 3, 1.0, [3, 3, 3]), (7, 2, 0.5, [2, 5]), (10, 4, 0.5, [1, 3, 3, 3]), (1, 3, 0.1, [1, 0, 0])],
)
def test_the_first_gpu_may_take_fewer_samples(samples: int, devices: int, first_share: float, sizes: list[int]) -> None:
    assert [place.stop - place.start for place in part_places(samples, devices, first_share)] == sizes


def test_samples_are_scattered_in_order_and_a_gpu_without_samples_is_left_out() -> None:
    layer = UnevenDataParallel(nn.Linear(1, 1), 0.5)
    sent, options = layer.scatter((torch.arange(7).view(-1, 1),), None, ["cpu", "cpu", "cpu"])
    assert [batch.flatten().tolist() for (batch,) in sent] == [[0], [1, 2, 3], [4, 5, 6]]
    assert len(options) == 3
    sent, options = layer.scatter((torch.arange(1).view(-1, 1),), None, ["cpu", "cpu", "cpu"])
    assert [batch.flatten().tolist() for (batch,) in sent] == [[0]]
    assert len(options) == 1


def steps_between_synchronisations(cfg: Any) -> list[int]:
    """A training in this rank -> after which steps the ranks synchronised."""
    from lockstep.strategies.async_server import ServedStep

    bring, found = ServedStep._bring_weights, []

    def noted(step: ServedStep, after: int) -> None:
        found.append(after)
        bring(step, after)

    ServedStep._bring_weights = noted  # type: ignore[method-assign]
    train(cfg)
    return found


def test_with_one_worker_an_asynchronous_server_is_one_process(tmp_path: Path) -> None:
    same = [*SMALL, "optimizer=adamw", ema(0.9), "trainer.gradient_accumulation_steps=2", "trainer.epochs=2",
            "trainer.max_grad_norm=0.5", "trainer.max_steps=7"]  # fmt: skip
    served = ["strategy=async_parameter_server", "strategy.sync_every=3"]
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'alone'}", *same, "logger=[]")])
    cfg = composed(f"run_dir={tmp_path / 'served'}", *same, *served, "logger=[]")
    assert in_world(2, steps_between_synchronisations, cfg) == [[3, 4, 6, 7]] * 2  # an epoch has four steps
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "served")) < 1e-12


def test_with_two_workers_every_step_is_taken_and_all_ranks_evaluate_the_same_weights(tmp_path: Path) -> None:
    served = [PAIRS_ON_TEST, "strategy=async_parameter_server", "logger=[tensorboard]", "trainer.epochs=2"]
    answers = in_world(3, train_all, [composed(f"run_dir={tmp_path}", *SMALL, *served)])
    assert answers[0] == answers[1] == answers[2]
    shown = scalars(tmp_path)
    assert [step for step, _ in shown["train/loss"]] == [4, 8]


def test_a_server_sends_every_type_exactly_and_leaves_weights_without_a_gradient_alone(tmp_path: Path) -> None:
    model = ["model=linear", "model._target_=support.models.WithConstants", "optimizer=adamw", "trainer.max_steps=3"]
    model += [ema(0.9)]  # which leaves an infinite mask as it is
    served = ["dataset=random", "strategy=async_parameter_server", "logger=[]", *model]
    in_world(2, train_all, [composed(f"run_dir={tmp_path}", *served)])
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    WithConstants([saved["layer.weight"].shape[1]], 1).assert_constant(saved)
    assert saved["seen"] == 3 * 64
