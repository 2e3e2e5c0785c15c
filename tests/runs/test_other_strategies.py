"""strategy=data_parallel, model_parallel and async_parameter_server."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.strategies.one_process import UnevenDataParallel
from support.commands import ema
from support.configs import composed
from support.digits import PAIRS_ON_TEST
from support.event_files import scalars
from support.models import WithConstants
from support.worlds import distance, in_world, train, train_all, weights

SMALL = ["dataset=random", "dataset.samples=61", "model=mlp", "model.width=16", "trainer.precision=fp64"]
SMALL += ["trainer.batch_size=16"]
RECURRENT = [*SMALL[:2], "model=linear", "model._target_=support.models.Recurrent", "trainer.precision=fp64"]
SERVER = ["strategy=async_parameter_server", "logger=[]"]
WAYS: dict[str, tuple[int, list[str], list[str]]] = {
    "copies": (1, SMALL, ["strategy=data_parallel"]),
    "halves on two ranks": (2, SMALL, ["strategy=model_parallel", "strategy.bucket_cap_mb=0.001"]),
    # Its layers are called with None, with tuples and by keyword.
    "thirds": (1, [*RECURRENT, "trainer.max_steps=2"], ["strategy=model_parallel", "strategy.devices=3"]),
}


def trained(configs: list[Any]) -> list[int]:
    """Trainings in this rank -> how many layers each has that move what they get to a device of theirs."""
    from lockstep.strategies import one_process

    found, move = [], one_process.move
    for cfg in configs:
        moved = set()

        def noted(device: Any, module: nn.Module, *tensors: Any, moved: Any = moved) -> Any:
            moved.add(module)
            return move(device, module, *tensors)

        one_process.move = noted
        train(cfg)
        found.append(len(moved))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_several_devices_of_a_process_have_one_processs_numbers(tmp_path: Path, way: str) -> None:
    ranks, words, strategy = WAYS[way]
    words = [*words, "trainer.epochs=1", "logger=[]"]
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'alone'}", *words)])
    found = in_world(ranks, trained, [composed(f"run_dir={tmp_path / 'spread'}", *words, *strategy)])
    assert all((layers > 2) == ("model_parallel" in strategy[0]) for (layers,) in found)
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "spread")) < 1e-12


@pytest.mark.parametrize(
    ("samples", "devices", "first_share", "sizes"),
    [(7, 1, 0.5, [7]), (9, 3, 1.0, [3, 3, 3]), (7, 3, 0.5, [1, 3, 3]), (10, 4, 0.5, [1, 3, 3, 3]), (1, 3, 0.1, [1])],
)
def test_the_first_gpu_may_take_fewer_samples(samples: int, devices: int, first_share: float, sizes: list[int]) -> None:
    """In their order; a GPU without samples is left out."""
    layer = UnevenDataParallel(nn.Linear(1, 1), first_share)
    sent, options = layer.scatter((torch.arange(samples).view(-1, 1),), None, ["cpu"] * devices)
    assert [len(batch) for (batch,) in sent] == sizes
    assert torch.cat([batch for (batch,) in sent]).flatten().tolist() == list(range(samples))
    assert len(options) == len(sizes)


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
    same = [*SMALL, "optimizer=adamw", ema(0.9), "trainer.gradient_accumulation_steps=2", "trainer.epochs=2"]
    same += ["trainer.max_grad_norm=0.5", "trainer.max_steps=7"]
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'alone'}", *same, "logger=[]")])
    cfg = composed(f"run_dir={tmp_path / 'served'}", *same, *SERVER, "strategy.sync_every=3")
    assert in_world(2, steps_between_synchronisations, cfg) == [[3, 4, 6, 7]] * 2  # an epoch has four steps
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "served")) < 1e-12


def test_with_two_workers_every_step_is_taken_and_all_ranks_evaluate_the_same_weights(tmp_path: Path) -> None:
    served = [PAIRS_ON_TEST, *SERVER, "logger=[tensorboard]", "trainer.epochs=2"]
    answers = in_world(3, train_all, [composed(f"run_dir={tmp_path}", *SMALL, *served)])
    assert answers[0] == answers[1] == answers[2]
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [4, 8]


def test_a_server_sends_every_type_exactly_and_leaves_weights_without_a_gradient_alone(tmp_path: Path) -> None:
    model = ["dataset=random", "model=linear", "model._target_=support.models.WithConstants", "optimizer=adamw"]
    model += ["trainer.max_steps=3", ema(0.9)]  # which leaves an infinite mask as it is
    in_world(2, train_all, [composed(f"run_dir={tmp_path}", *SERVER, *model)])
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    WithConstants([saved["layer.weight"].shape[1]], 1).assert_constant(saved)
    assert saved["seen"] == 3 * 64
