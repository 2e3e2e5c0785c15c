"""Options of trainer, evaluation and sync_bn by what the model sees: shapes, types, layouts, and when."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import ON_TEST, ema
from support.configs import composed, with_values
from support.event_files import scalars
from support.recording import Call, record_trainings
from support.reference import parameter_vector, saved_parameters
from support.worlds import distance, in_world, train_all

pytestmark = pytest.mark.whole

PAIRS = [
    "dataset=random",
    "dataset.samples=30",
    "model=linear",
    "trainer.batch_size=12",
    "trainer.epochs=1",
    "logger=[]",
]
IMAGES = ["model=convnet", "trainer.max_steps=1", "trainer.epochs=1", "logger=[]", "evaluation.batch_size=360"]


def recorded(size: int, base: Any, folder: Path, *runs: list[str]) -> list[list[Call]]:
    """What rank 0 sees in each of the runs."""
    configs = [with_values(base, f"run_dir={folder / str(number)}", *values) for number, values in enumerate(runs)]
    calls: list[list[Call]] = in_world(size, record_trainings, configs)[0]
    return calls


def test_batches_of_training_and_evaluation_have_the_sizes_asked_for(tmp_path: Path) -> None:
    plain, accumulated, evaluated, per_rank = recorded(
        2,
        composed(*PAIRS),
        tmp_path,
        [],
        ["trainer.gradient_accumulation_steps=3"],
        ["evaluation.batch_size=10"],
        ["trainer.batch_size_per_rank=5"],
    )
    assert rows(plain, training=True) == [6, 6, 3]
    assert rows(accumulated, training=True) == [2] * 6 + [1, 1, 1]
    assert rows(per_rank, training=True) == [5, 5, 5]
    assert rows(plain, training=False) == [15]
    assert rows(evaluated, training=False) == [5, 5, 5]  # of both ranks together


def rows(calls: list[Call], training: bool) -> list[int]:
    return [call.shape[0] for call in calls if call.training == training]


def test_the_model_computes_in_the_precision_layout_and_determinism_asked_for(tmp_path: Path) -> None:
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    runs = [[f"trainer.precision={name}"] for name in types]
    runs += [["trainer.channels_last=false"], ["trainer.channels_last=true"], ["trainer.deterministic=true"]]
    *precisions, first, last, deterministic = recorded(1, composed(*IMAGES), tmp_path, *runs)
    for calls, computed in zip(precisions, types.values(), strict=True):
        stored = torch.float64 if computed == torch.float64 else torch.float32
        assert {call.training for call in calls} == {True, False}
        assert {(call.output_type, call.weight_type) for call in calls} == {(computed, stored)}
    for calls, expected in (
        (precisions[0], True),
        (first, False),
        (last, True),
    ):  # auto: an image model is channels_last
        second = [call for call in calls if call.layer == "Conv2d"][1]
        assert (second.channels_last_input, second.channels_last_weight) == (expected, expected)
    assert not any(call.deterministic for call in precisions[0])
    assert all(call.deterministic for call in deterministic)


def test_a_model_without_convolutions_stays_contiguous(tmp_path: Path) -> None:
    from lockstep.models.tutorial import mlp
    from lockstep.training.setup import model_memory_format

    net, cpu = mlp([1, 8, 8], 10, 8, 1, 0.0), torch.device("cpu")
    assert model_memory_format(net, "auto", cpu) == torch.contiguous_format
    assert model_memory_format(net, True, cpu) == torch.channels_last


def test_a_shortcut_from_rgb_stays_contiguous_on_a_cpu_where_the_other_layout_damages_memory() -> None:
    from lockstep.errors import ConfigError
    from lockstep.training.setup import model_memory_format

    net, cpu = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 1, stride=2)), torch.device("cpu")
    assert model_memory_format(net, "auto", cpu) == torch.contiguous_format
    assert model_memory_format(net, "auto", torch.device("cuda")) == torch.channels_last
    assert model_memory_format(torch.nn.Conv2d(8, 16, 1, stride=2), "auto", cpu) == torch.channels_last
    with pytest.raises(ConfigError, match=r"1x1 convolution .* \(0\) .*type trainer.channels_last=auto"):
        model_memory_format(net, True, cpu)


EVALUATED = [
    "model=linear", "trainer.epochs=5", "trainer.precision=fp64", "scheduler=constant", "logger=[tensorboard]",
    "trainer.batch_size=500", "monitor=val/loss", ON_TEST, "dataset.mean=null", "dataset.std=null",
]  # fmt: skip


def test_evaluations_come_when_they_are_due_and_end_a_run_that_does_not_improve(tmp_path: Path) -> None:
    base = composed(*EVALUATED)
    runs = {
        "each": [],
        "every": ["evaluation.every=2"],
        "still": ["evaluation.patience=2", "optimizer.lr=1.0e-300"],  # the loss stays the same in every bit
        "better": ["evaluation.patience=2"],
    }
    in_world(1, train_all, [with_values(base, f"run_dir={tmp_path / name}", *values) for name, values in runs.items()])
    steps = {name: [step for step, _ in scalars(tmp_path / name)["val/loss"]] for name in runs}
    assert steps["each"] == steps["better"] == [3, 6, 9, 12, 15]
    assert steps["every"] == [6, 12, 15]  # and at the end
    assert steps["still"] == [3, 6, 9]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_average_of_the_weights_is_evaluated_and_exported(tmp_path: Path, ranks: int) -> None:
    base = composed(*EVALUATED, "trainer.epochs=1")
    runs = {str(step): [f"trainer.max_steps={step}"] for step in (1, 2, 3)} | {"ema": [ema(0.7)]}
    in_world(
        ranks, train_all, [with_values(base, f"run_dir={tmp_path / name}", *values) for name, values in runs.items()]
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).double()
    first, second, third = (saved_parameters(tmp_path / name, model) for name in "123")
    by_hand = 0.7 * (0.7 * first + 0.3 * second) + 0.3 * third
    assert distance(by_hand, saved_parameters(tmp_path / "ema", model)) < 1e-12
    assert scalars(tmp_path / "ema")["val/loss"][-1][1] == pytest.approx(loss_with(model, by_hand), rel=1e-6)


def loss_with(model: torch.nn.Module, weights: torch.Tensor) -> float:
    """The mean cross entropy of the test digits under these weights."""
    from support.digits import digits

    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    assert torch.equal(parameter_vector(model), weights)
    data = digits(train=False)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(data.inputs.double() / 255), data.targets))
