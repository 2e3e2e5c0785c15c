"""Options of trainer, evaluation and sync_bn by what the model sees: shapes, types, layouts, and when."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.training.setup import model_memory_format
from support.commands import ON_TEST, ema
from support.configs import composed, with_values
from support.digits import digits
from support.event_files import scalars
from support.reference import saved_parameters
from support.worlds import distance, in_world, train, train_all

PAIRS = ["dataset=random", "dataset.samples=30", "model=linear", "trainer.batch_size=12", "trainer.epochs=1"]
IMAGES = ["model=convnet", "trainer.max_steps=1", "trainer.epochs=1", "evaluation.batch_size=360"]


class Call(NamedTuple):
    """One forward pass of a linear layer or convolution. channels_last: of its inputs and of its weight."""

    layer: str
    training: bool
    rows: int
    types: tuple[torch.dtype, torch.dtype]  # of outputs and weight
    channels_last: tuple[bool, bool]
    deterministic: bool


def record_trainings(configs: list[Any]) -> list[list[Call]]:
    """Trainings in this rank -> the calls of each, in order."""
    found: list[list[Call]] = []

    def is_last(tensor: Tensor) -> bool:
        of_images = tensor.dim() == 4 and not tensor.is_contiguous()
        return of_images and tensor.is_contiguous(memory_format=torch.channels_last)

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            types, layouts = (output.dtype, layer.weight.dtype), (is_last(inputs[0]), is_last(layer.weight))
            deterministic = torch.are_deterministic_algorithms_enabled()
            found[-1].append(Call(type(layer).__name__, layer.training, len(inputs[0]), types, layouts, deterministic))

    nn.modules.module.register_module_forward_hook(record)
    for cfg in configs:
        found.append([])
        train(cfg)
    return found


def recorded(size: int, base: list[str], folder: Path, *runs: list[str]) -> list[list[Call]]:
    """What rank 0 sees in each of the runs."""
    configs = [composed(*base, "logger=[]", f"run_dir={folder / str(n)}", *values) for n, values in enumerate(runs)]
    calls: list[list[Call]] = in_world(size, record_trainings, configs)[0]
    return calls


def test_batches_of_training_and_evaluation_have_the_sizes_asked_for(tmp_path: Path) -> None:
    cases: list[tuple[list[str], bool, list[int]]] = [
        ([], True, [6, 6, 3]),
        ([], False, [15]),
        (["trainer.gradient_accumulation_steps=3"], True, [2] * 6 + [1, 1, 1]),
        (["trainer.batch_size_per_rank=5"], True, [5, 5, 5]),
        (["evaluation.batch_size=10"], False, [5, 5, 5]),  # of both ranks together
    ]
    found = recorded(2, PAIRS, tmp_path, *(words for words, _, _ in cases))
    for (words, training, rows), calls in zip(cases, found, strict=True):
        assert [call.rows for call in calls if call.training == training] == rows, words


def test_the_model_computes_in_the_precision_layout_and_determinism_asked_for(tmp_path: Path) -> None:
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    runs = [[f"trainer.precision={name}"] for name in types]
    runs += [["trainer.channels_last=false"], ["trainer.channels_last=true"], ["trainer.deterministic=true"]]
    *precisions, first, last, deterministic = recorded(1, IMAGES, tmp_path, *runs)
    for calls, computed in zip(precisions, types.values(), strict=True):
        stored = torch.float64 if computed == torch.float64 else torch.float32
        assert {call.training for call in calls} == {True, False}
        assert {call.types for call in calls} == {(computed, stored)}
    for calls, expected in ((precisions[0], True), (first, False), (last, True)):  # auto: images are channels_last
        second = [call for call in calls if call.layer == "Conv2d"][1]
        assert second.channels_last == (expected, expected)
    assert not any(call.deterministic for call in precisions[0])
    assert all(call.deterministic for call in deterministic)


def test_the_layout_of_a_model_is_one_that_its_kernels_can_compute() -> None:
    """On a CPU the other layout of a shortcut from RGB damages memory."""
    last, plain = torch.channels_last, torch.contiguous_format
    rgb, cpu = nn.Sequential(nn.Conv2d(3, 16, 1, stride=2)), torch.device("cpu")
    for net, typed, device, expected in (
        (nn.Linear(8, 8), "auto", cpu, plain),
        (nn.Linear(8, 8), True, cpu, last),
        (rgb, "auto", cpu, plain),
        (rgb, "auto", torch.device("cuda"), last),
        (nn.Conv2d(8, 16, 1, stride=2), "auto", cpu, last),
    ):
        assert model_memory_format(net, typed, device) == expected
    with pytest.raises(ConfigError, match=r"1x1 convolution .* \(0\) .*type trainer.channels_last=auto"):
        model_memory_format(rgb, True, cpu)


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
    configs = [with_values(base, f"run_dir={tmp_path / name}", *values) for name, values in runs.items()]
    in_world(ranks, train_all, configs)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    first, second, third = (saved_parameters(tmp_path / name, model) for name in "123")
    by_hand = 0.7 * (0.7 * first + 0.3 * second) + 0.3 * third
    assert distance(by_hand, saved_parameters(tmp_path / "ema", model)) < 1e-12
    nn.utils.vector_to_parameters(by_hand, model.parameters())
    data = digits(train=False)
    loss = nn.functional.cross_entropy(model(data.inputs.double() / 255), data.targets)
    assert scalars(tmp_path / "ema")["val/loss"][-1][1] == pytest.approx(loss.item(), rel=1e-6)
