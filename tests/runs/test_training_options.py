"""Options of trainer, optimizer, scheduler and seed against a training loop written in plain torch."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.data.vision import RandomPairs
from lockstep.models.tutorial import mlp
from support.configs import composed, with_values
from support.event_files import scalars
from support.reference import Reference, saved_parameters, train_reference
from support.worlds import distance, in_world, train, train_all

# 61 samples in batches of 16: four steps an epoch, the last one of 13 samples, which two ranks cannot halve.
BASE = [
    "dataset=random", "dataset.samples=61", "model=mlp", "model.width=8", "trainer.batch_size=16", "trainer.epochs=2",
    "trainer.precision=fp64", "scheduler=constant", "logging.every=1", "logger=[tensorboard]",
]  # fmt: skip
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.002)


def cosine(steps: int, warmup: int, final: float, number: int) -> float:
    if number < warmup:
        return (number + 1) / warmup
    return final + (1 - final) * (1 + math.cos(math.pi * (number - warmup) / (steps - warmup))) / 2


def pos_weight(target: str) -> tuple[list[str], Any, dict[str, Any]]:
    """A loss whose factors are a node; they get the type of the run."""
    factors = "{_target_: torch.tensor, data: [3.0]}"
    node = f"task.loss={{_target_: torch.{target}, reduction: none, pos_weight: {factors}}}"
    loss = partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([3.0]).double())
    return [node], SGD, {"loss_function": loss}


# name: (overrides, the optimizer of the plain loop, its other options)
RUNS = {
    "sgd": ([], SGD, {}),
    "seed": (["seed=5"], SGD, {"seed": 5}),
    "epochs": (["trainer.epochs=3"], SGD, {"epochs": 3}),
    "optimizer.lr": (["optimizer.lr=0.2"], partial(SGD, lr=0.2), {}),
    "optimizer.momentum": (["optimizer.momentum=0.5"], partial(SGD, momentum=0.5), {}),
    "optimizer.nesterov": (["optimizer.nesterov=true"], partial(SGD, nesterov=True), {}),
    "optimizer.weight_decay": (["optimizer.weight_decay=0.1"], partial(SGD, weight_decay=0.1), {}),
    "optimizer.fused": (["optimizer.fused=false"], SGD, {}),
    "adamw": (["optimizer=adamw"], ADAMW, {}),
    "adamw's options": (
        ["optimizer=adamw", "optimizer.betas=[0.5,0.9]", "optimizer.eps=0.01", "optimizer.weight_decay=0.3"],
        partial(ADAMW, betas=(0.5, 0.9), eps=0.01, weight_decay=0.3),
        {},
    ),
    "trainer.batch_size": (["trainer.batch_size=20"], SGD, {"batch_size": 20}),
    "trainer.max_steps": (["trainer.max_steps=6"], SGD, {"max_steps": 6}),
    "trainer.max_grad_norm": (["trainer.max_grad_norm=0.2"], SGD, {"max_grad_norm": 0.2}),
    "trainer.gradient_accumulation_steps": (["trainer.gradient_accumulation_steps=3"], SGD, {}),
    "scheduler=cosine": (["scheduler=cosine"], SGD, {"lr_factor": partial(cosine, 8, 2, 0.0)}),
    "scheduler=cosine's options": (
        ["scheduler=cosine", "scheduler.warmup_epochs=1", "scheduler.final_lr_ratio=0.3", "trainer.max_steps=7"],
        SGD,
        {"lr_factor": partial(cosine, 7, 4, 0.3), "max_steps": 7},
    ),
    "scheduler=step": (
        ["scheduler=step", "scheduler.step_epochs=1", "scheduler.gamma=0.25"],
        SGD,
        {"lr_factor": lambda number: 1.0 if number < 4 else 0.25},
    ),
    "a loss that is a class": pos_weight("nn.BCEWithLogitsLoss"),
    "a loss that is a function": pos_weight("nn.functional.binary_cross_entropy_with_logits, _partial_: true"),
}


def reference(name: str) -> Reference:
    _, optimizer, options = RUNS[name]
    seed = options.get("seed", 0)
    data = RandomPairs(samples=61, features=20, seed=seed).splits().train
    torch.manual_seed(seed)
    model = mlp([20], 1, width=8, depth=2, dropout=0.0).double()
    pairs = (data.inputs.double(), data.targets.double())
    typed = {"loss_function": F.mse_loss, "epochs": 2, "batch_size": 16} | options
    return train_reference(model, pairs, make_optimizer=optimizer, **typed)


ON_TWO_RANKS = [
    "a loss that is a class",
    "sgd", "adamw's options", "trainer.max_steps", "trainer.max_grad_norm", "trainer.gradient_accumulation_steps"
]  # fmt: skip


def config(folder: Path, overrides: list[str]) -> Any:
    groups = [override for override in overrides if "." not in override.partition("=")[0]]
    values = [override for override in overrides if override not in groups]
    return with_values(composed(*BASE, *groups), f"run_dir={folder}", *values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    """The run folder of each of RUNS on one rank, and of ON_TWO_RANKS on two."""
    parent = tmp_path_factory.mktemp("trained")
    names = [(1, name) for name in RUNS] + [(2, name) for name in ON_TWO_RANKS]
    folders = {key: parent / str(number) for number, key in enumerate(names)}
    for ranks in (1, 2):
        in_world(ranks, train_all, [config(folders[key], RUNS[key[1]][0]) for key in names if key[0] == ranks])
    return folders


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_plain_loop(trained: dict[tuple[int, str], Path], name: str) -> None:
    expected, plain = reference(name), reference("sgd").weights
    assert distance(expected.weights, saved_parameters(trained[1, name], expected.model)) < 1e-11
    if name not in ("sgd", "optimizer.fused", "trainer.gradient_accumulation_steps"):
        assert distance(expected.weights, plain) > 1e-4  # the option changes something in the plain loop


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_a_run_on_two_ranks_is_the_plain_loop(trained: dict[tuple[int, str], Path], name: str) -> None:
    expected = reference(name)
    assert distance(expected.weights, saved_parameters(trained[2, name], expected.model)) < 1e-11


def test_each_step_logs_its_loss_its_gradient_and_the_next_learning_rate(trained: dict[tuple[int, str], Path]) -> None:
    shown, expected = scalars(trained[1, "scheduler=cosine"]), reference("scheduler=cosine")
    assert [step for step, _ in shown["train/running_loss"]] == list(range(1, 9))
    assert [loss for _, loss in shown["train/running_loss"]] == pytest.approx(expected.losses, rel=1e-6)
    assert [lr for _, lr in shown["train/lr"]] == pytest.approx([0.05 * cosine(8, 2, 0.0, n) for n in range(1, 9)])
    for ranks in (1, 2):
        norms, expected = scalars(trained[ranks, "trainer.max_grad_norm"]), reference("trainer.max_grad_norm")
        assert [norm for _, norm in norms["train/grad_norm"]] == pytest.approx(expected.norms, rel=1e-6)  # unclipped
    steps = {"trainer.batch_size": 8, "trainer.max_steps": 6, "epochs": 12}
    for name, count in steps.items():
        assert len(scalars(trained[1, name])["train/lr"]) == count, name


def tf32_flags(cfg):
    train(cfg)
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("words", "flags"),
    [([], (False, True)), (["trainer.tf32=true"], (True, True)), (["trainer.tf32=false"], (False, False))],
)
def test_float32_on_gpus_is_as_exact_as_asked_for(words, flags, tmp_path):
    short = ["model=linear", "trainer.max_steps=1", "logger=[]", f"run_dir={tmp_path}"]
    assert in_world(1, tf32_flags, composed(*short, *words)) == [flags]
