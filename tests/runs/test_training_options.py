"""Options of trainer, optimizer, scheduler, evaluation and seed against a training loop written in plain torch, and by
what the model sees: shapes, types, layouts, and when."""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.vision import RandomPairs
from lockstep.models.tutorial import mlp
from lockstep.training.optimizers import Muon, orthogonalised
from lockstep.training.setup import model_memory_format
from support.commands import ON_TEST, ema
from support.configs import composed, with_values
from support.event_files import scalars
from support.reference import saved_parameters, train_reference
from support.refusals import accepted
from support.worlds import distance, in_world, same_bits, train, train_all, weights

# 61 samples in batches of 16: four steps an epoch, the last one of 13 samples, which two ranks cannot halve.
BASE = ["dataset=random", "dataset.samples=61", "model=mlp", "model.width=8", "trainer.batch_size=16"]
BASE += ["trainer.epochs=2", "trainer.precision=fp64", "scheduler=constant", "logging.every=1", "logger=[tensorboard]"]
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.002)
STEP_LR = "scheduler=torch scheduler.schedule={_target_:torch.optim.lr_scheduler.StepLR,step_size:%d,gamma:0.5}"


def cosine(steps, warmup, final, number):
    if number < warmup:
        return (number + 1) / warmup
    return final + (1 - final) * (1 + math.cos(math.pi * (number - warmup) / (steps - warmup))) / 2


def pos_weight(target):
    """A loss whose factors are a node; they get the type of the run."""
    node = f"task.loss={{_target_:torch.{target},reduction:none,pos_weight:{{_target_:torch.tensor,data:[3.0]}}}}"
    return (
        node,
        SGD,
        {"loss_function": partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(3.0).double())},
    )


# name: (overrides, the optimizer of the plain loop, its other options)
RUNS = {
    "sgd": ("", SGD, {}),
    "seed": ("seed=5", SGD, {"seed": 5}),
    "epochs": ("trainer.epochs=3", SGD, {"epochs": 3}),
    "optimizer.lr": ("optimizer.lr=0.2", partial(SGD, lr=0.2), {}),
    "optimizer.momentum": ("optimizer.momentum=0.5", partial(SGD, momentum=0.5), {}),
    "optimizer.nesterov": ("optimizer.nesterov=true", partial(SGD, nesterov=True), {}),
    "optimizer.weight_decay": ("optimizer.weight_decay=0.1", partial(SGD, weight_decay=0.1), {}),
    "optimizer.fused": ("optimizer.fused=false", SGD, {}),
    "adamw": (
        "optimizer=adamw optimizer.betas=[0.5,0.9] optimizer.eps=0.01 optimizer.weight_decay=0.3",
        partial(ADAMW, betas=(0.5, 0.9), eps=0.01, weight_decay=0.3),
        {},
    ),
    "trainer.batch_size": ("trainer.batch_size=20", SGD, {"batch_size": 20}),
    "trainer.max_steps": ("trainer.max_steps=6", SGD, {"max_steps": 6}),
    "trainer.max_grad_norm": ("trainer.max_grad_norm=0.2", SGD, {"max_grad_norm": 0.2}),
    "trainer.gradient_accumulation_steps": ("trainer.gradient_accumulation_steps=3", SGD, {}),
    "scheduler=cosine": ("scheduler=cosine", SGD, {"lr_factor": partial(cosine, 8, 2, 0.0)}),
    "scheduler=cosine's options": (
        "scheduler=cosine scheduler.warmup_epochs=1 scheduler.final_lr_ratio=0.3 trainer.max_steps=7",
        SGD,
        {"lr_factor": partial(cosine, 7, 4, 0.3), "max_steps": 7},
    ),
    "scheduler=step": (
        "scheduler=step scheduler.step_epochs=1 scheduler.gamma=0.25",
        SGD,
        {"lr_factor": lambda number: 0.25 ** (number // 4)},
    ),
    "scheduler=torch": (STEP_LR % 1, SGD, {"lr_factor": lambda number: 0.5 ** (number // 4)}),
    "scheduler.every": (STEP_LR % 3 + " scheduler.every=step", SGD, {"lr_factor": lambda n: 0.5 ** (n // 3)}),
    "a loss that is a class": pos_weight("nn.BCEWithLogitsLoss"),
    "a loss that is a function": pos_weight("nn.functional.binary_cross_entropy_with_logits,_partial_:true"),
}
ON_TWO_RANKS = ["sgd", "adamw", "trainer.max_steps", "trainer.max_grad_norm", "trainer.gradient_accumulation_steps"]
ON_TWO_RANKS += ["a loss that is a class"]


def reference(name):
    _, optimizer, options = RUNS[name]
    seed = options.get("seed", 0)
    data = RandomPairs(samples=61, features=20, seed=seed).splits().train
    torch.manual_seed(seed)
    model = mlp([20], 1, width=8, depth=2, dropout=0.0).double()
    pairs = (data.inputs.double(), data.targets.double())
    typed = {"loss_function": F.mse_loss, "epochs": 2, "batch_size": 16} | options
    return train_reference(model, pairs, make_optimizer=optimizer, **typed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run folder of each of RUNS on one rank, and of ON_TWO_RANKS on two; and of an average of the weights."""
    parent = tmp_path_factory.mktemp("trained")
    words = {(1, name): row[0].split() for name, row in RUNS.items()} | {(1, "ema"): [ema(0.7)]}
    words |= {(2, name): RUNS[name][0].split() for name in ON_TWO_RANKS} | {(2, "ema"): [ema(0.7)]}
    folders = {key: parent / str(number) for number, key in enumerate(words)}
    for ranks in (1, 2):
        chosen = [key for key in words if key[0] == ranks]
        in_world(ranks, train_all, [composed(*BASE, *words[key], f"run_dir={folders[key]}") for key in chosen])
    return folders


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_plain_loop(trained, name):
    expected, plain = reference(name), reference("sgd").weights
    for ranks in (1, 2) if name in ON_TWO_RANKS else (1,):
        assert distance(expected.weights, saved_parameters(trained[ranks, name], expected.model)) < 1e-11
    if name not in ("sgd", "optimizer.fused", "trainer.gradient_accumulation_steps"):
        assert distance(expected.weights, plain) > 1e-4  # the option changes something in the plain loop


def test_the_average_of_the_weights_is_what_a_run_leaves(trained):
    plain = reference("sgd")
    first, *others = plain.trajectory
    for step in others:
        first = 0.7 * first + 0.3 * step
    for ranks in (1, 2):
        assert distance(first, saved_parameters(trained[ranks, "ema"], plain.model)) < 1e-11


def test_each_step_logs_its_loss_its_gradient_and_the_next_learning_rate(trained):
    shown, expected = scalars(trained[1, "scheduler=cosine"]), reference("scheduler=cosine")
    assert [step for step, _ in shown["train/running_loss"]] == list(range(1, 9))
    assert [loss for _, loss in shown["train/running_loss"]] == pytest.approx(expected.losses, rel=1e-6)
    assert [lr for _, lr in shown["train/lr"]] == pytest.approx([0.05 * cosine(8, 2, 0.0, n) for n in range(1, 9)])
    for ranks in (1, 2):
        norms, expected = scalars(trained[ranks, "trainer.max_grad_norm"]), reference("trainer.max_grad_norm")
        assert [norm for _, norm in norms["train/grad_norm"]] == pytest.approx(expected.norms, rel=1e-6)  # unclipped


def tf32_flags(configs):
    found = []
    for cfg in configs:
        train(cfg)
        found.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
    return found


def test_float32_on_gpus_is_as_exact_as_asked_for(tmp_path):
    words = ["model=linear", "trainer.max_steps=1", "logger=[]", f"run_dir={tmp_path}"]
    ways = [[], ["trainer.tf32=true"], ["trainer.tf32=false"]]
    found = in_world(1, tf32_flags, [composed(*words, *way) for way in ways])
    assert found == [[(False, True), (True, True), (False, False)]]


GOES_ON = ["model=mlp", "trainer.precision=fp64", "logging.every=1", "logger=[tensorboard]"]


def test_a_run_on_a_plateau_lowers_its_rate_and_goes_on_where_it_stopped(tmp_path):
    """The objective cannot get better by a share of 100, so the rate is halved after each evaluation but the first."""
    words = ["scheduler=plateau", "scheduler.factor=0.5", "scheduler.patience=0", "scheduler.threshold=100"]
    cfg = accepted(*words, *GOES_ON, "trainer.epochs=5", "trainer.batch_size=500")
    whole, moved = (with_values(cfg, f"run_dir={tmp_path / name}") for name in ("whole", "moved"))
    in_world(2, train_all, [whole, with_values(moved, "trainer.pause_after=3"), moved])
    assert same_bits(tmp_path / "whole", tmp_path / "moved")
    found = [rate for _, rate in scalars(tmp_path / "whole")["train/lr"]]
    assert found == [rate for _, rate in scalars(tmp_path / "moved")["train/lr"]]
    assert sorted(set(found), reverse=True) == pytest.approx([0.05, 0.025, 0.0125, 0.00625], rel=1e-5)


def net():
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 9), nn.ReLU(), nn.Linear(9, 5)).double()


def stepped(model, *optimizers):
    inputs = torch.randn(7, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        model(inputs).square().sum().backward()
        for one in optimizers:
            one.step()
        model.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("head", ["muon", "adamw"])
def test_muon_takes_the_matrices_and_adamw_the_rest(head):
    """AdamW beside it is torch's own; a step of a matrix is worked out by hand."""
    adamw = partial(torch.optim.AdamW, lr=0.003, betas=(0.8, 0.9), weight_decay=0.1)
    frozen, model, third = net(), net(), net()
    own = [frozen[0].weight, frozen[2].weight, *([frozen[4].weight] if head == "muon" else [])]
    others = [p for p in frozen.parameters() if all(p is not matrix for matrix in own)]
    body, last = list(model.parameters())[:-2], list(model.parameters())[-2:]
    groups = [*body, *last] if head == "muon" else [{"params": body}, {"params": last, "use_muon": False}]
    still = Muon(groups, 1e-15, 0.9, 0.0, 5, False, adamw)
    for found, wanted in zip(stepped(model, still), stepped(frozen, adamw(others)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    third(torch.randn(7, 1, 8, 8, dtype=torch.float64)).square().sum().backward()
    weight = third[2].weight
    before, gradient = weight.detach().clone(), weight.grad.clone()
    Muon(third.parameters(), 0.02, 0.9, 0.1, 5, False, adamw).step()
    expected_weight = before * (1 - 0.02 * 0.1) - 0.02 * orthogonalised(gradient, 5)  # wider than high: no factor
    torch.testing.assert_close(weight.detach(), expected_weight, rtol=1e-5, atol=1e-7)


def test_muon_and_a_schedule_of_torch_go_on_where_they_stopped(tmp_path):
    words = ["optimizer=muon", *(STEP_LR % 1).split(), *GOES_ON, "trainer.epochs=3", "trainer.batch_size=200", ON_TEST]
    cfg = accepted(*words)
    whole, moved, alone = (with_values(cfg, f"run_dir={tmp_path / name}") for name in ("whole", "moved", "alone"))
    sharded = accepted(*words, "strategy=fsdp", f"run_dir={tmp_path / 'sharded'}")
    in_world(2, train_all, [whole, with_values(moved, "trainer.max_steps=10"), moved, sharded])
    in_world(1, train_all, [alone])
    assert same_bits(tmp_path / "whole", tmp_path / "moved")
    rates = scalars(tmp_path / "whole")["train/lr"]
    assert rates == scalars(tmp_path / "moved")["train/lr"]
    for other in ("alone", "sharded"):
        assert distance(weights(tmp_path / "whole"), weights(tmp_path / other)) < 1e-9
    expected = [0.02 * 0.5 ** ((step - 1) // 8) for step in range(1, 25)]
    assert [rate for _, rate in rates][:-1] == pytest.approx(expected[1:], rel=1e-5)


class Call(NamedTuple):
    """One forward pass of a linear layer or convolution. channels_last: of its inputs and of its weight."""

    layer: str
    training: bool
    rows: int
    types: tuple[torch.dtype, torch.dtype]  # of outputs and weight
    channels_last: tuple[bool, bool]
    deterministic: bool


def record_trainings(configs):
    """Trainings in this rank -> the calls of each, in order."""
    found = []

    def is_last(tensor):
        of_images = tensor.dim() == 4 and not tensor.is_contiguous()
        return of_images and tensor.is_contiguous(memory_format=torch.channels_last)

    def record(layer, inputs, output):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            types, layouts = (output.dtype, layer.weight.dtype), (is_last(inputs[0]), is_last(layer.weight))
            deterministic = torch.are_deterministic_algorithms_enabled()
            found[-1].append(Call(type(layer).__name__, layer.training, len(inputs[0]), types, layouts, deterministic))

    nn.modules.module.register_module_forward_hook(record)
    for cfg in configs:
        found.append([])
        train(cfg)
    return found


def recorded(size, base, folder, *runs):
    """What rank 0 sees in each of the runs."""
    configs = [composed(*base, "logger=[]", f"run_dir={folder / str(n)}", *values) for n, values in enumerate(runs)]
    return in_world(size, record_trainings, configs)[0]


def test_batches_of_training_and_evaluation_have_the_sizes_asked_for(tmp_path):
    base = ["dataset=random", "dataset.samples=30", "model=linear", "trainer.batch_size=12", "trainer.epochs=1"]
    cases = [
        ([], True, [6, 6, 3]),
        ([], False, [15]),
        (["trainer.gradient_accumulation_steps=3"], True, [2] * 6 + [1, 1, 1]),
        (["trainer.batch_size_per_rank=5"], True, [5, 5, 5]),
        (["evaluation.batch_size=10"], False, [5, 5, 5]),  # of both ranks together
    ]
    found = recorded(2, base, tmp_path, *(words for words, _, _ in cases))
    for (words, training, rows), calls in zip(cases, found, strict=True):
        assert [call.rows for call in calls if call.training == training] == rows, words


def test_the_model_computes_in_the_precision_layout_and_determinism_asked_for(tmp_path):
    base = ["model=convnet", "trainer.max_steps=1", "trainer.epochs=1", "evaluation.batch_size=360"]
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    runs = [[f"trainer.precision={name}"] for name in types]
    runs += [["trainer.channels_last=false"], ["trainer.channels_last=true"], ["trainer.deterministic=true"]]
    *precisions, first, last, deterministic = recorded(1, base, tmp_path, *runs)
    for calls, computed in zip(precisions, types.values(), strict=True):
        stored = torch.float64 if computed == torch.float64 else torch.float32
        assert {call.training for call in calls} == {True, False}
        assert {call.types for call in calls} == {(computed, stored)}
    for calls, expected in ((precisions[0], True), (first, False), (last, True)):  # auto: images are channels_last
        second = [call for call in calls if call.layer == "Conv2d"][1]
        assert second.channels_last == (expected, expected)
    assert not any(call.deterministic for call in precisions[0])
    assert all(call.deterministic for call in deterministic)


def test_the_layout_of_a_model_is_one_that_its_kernels_can_compute():
    """On a CPU the other layout of a shortcut from RGB damages memory."""
    last, plain = torch.channels_last, torch.contiguous_format
    rgb, cpu = nn.Sequential(nn.Conv2d(3, 16, 1, stride=2)), torch.device("cpu")
    for model, typed, device, expected in (
        (nn.Linear(8, 8), "auto", cpu, plain),
        (nn.Linear(8, 8), True, cpu, last),
        (rgb, "auto", cpu, plain),
        (rgb, True, cpu, plain),
        (rgb, "auto", torch.device("cuda"), last),
        (nn.Conv2d(8, 16, 1, stride=2), "auto", cpu, last),
    ):
        assert model_memory_format(model, typed, device) == expected


def test_evaluations_come_when_they_are_due_and_end_a_run_that_does_not_improve(tmp_path):
    words = ["model=linear", "trainer.epochs=5", "trainer.precision=fp64", "scheduler=constant", "logger=[tensorboard]"]
    words += ["trainer.batch_size=500", "monitor=val/loss", ON_TEST]
    runs = {
        "each": [],
        "every": ["evaluation.every=2"],
        "still": ["evaluation.patience=2", "optimizer.lr=1.0e-300"],  # the loss stays the same in every bit
        "better": ["evaluation.patience=2"],
    }
    in_world(1, train_all, [composed(*words, *more, f"run_dir={tmp_path / name}") for name, more in runs.items()])
    steps = {name: [step for step, _ in scalars(tmp_path / name)["val/loss"]] for name in runs}
    assert steps["each"] == steps["better"] == [3, 6, 9, 12, 15]
    assert steps["every"] == [6, 12, 15]  # and at the end
    assert steps["still"] == [3, 6, 9]
