"""Muon with AdamW, and any schedule of torch, against plain torch and over a resume."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lockstep.training.optimizers import Muon, orthogonalised
from lockstep.training.schedules import Plateau, TorchSchedule
from support.commands import ON_TEST, Command
from support.configs import with_values
from support.event_files import scalars
from support.refusals import accepted, answer
from support.worlds import distance, in_world, same_bits, train_all, weights

STEPS_PER_EPOCH, EPOCHS = 4, 6
SCHEDULES = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": EPOCHS},
    "LinearLR": {"start_factor": 0.25, "total_iters": 3},
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (2.0, 0.5)], lr=1.0)


def rates(made: torch.optim.Optimizer, move: Callable[[int], object], steps: range) -> list[list[float]]:
    """The learning rates of each step, of both groups. move: gets how many steps are done."""
    found = []
    for step in steps:
        found.append([group["lr"] for group in made.param_groups])
        made.step()
        move(step + 1)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("every", ["step", "epoch"])
def test_a_schedule_of_torch_moves_on_after_steps_or_epochs(name: str, every: str) -> None:
    steps, plain = STEPS_PER_EPOCH * EPOCHS, optimizer()
    moves = steps if every == "step" else EPOCHS
    theirs = getattr(lr_scheduler, name)(plain, **SCHEDULES[name])
    by_move = rates(plain, lambda step: theirs.step(), range(moves))
    expected = [by_move[step // (1 if every == "step" else STEPS_PER_EPOCH)] for step in range(steps)]
    ours = optimizer()
    scheduler = TorchSchedule(ours, STEPS_PER_EPOCH, partial(getattr(lr_scheduler, name), **SCHEDULES[name]), every)
    for step, found in enumerate(rates(ours, scheduler, range(steps))):
        assert found == pytest.approx(expected[step], rel=1e-12), step


@pytest.mark.parametrize(
    "typed",
    [
        ["scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"],
        ["scheduler=torch", "scheduler.schedule={_target_:torch.optim.lr_scheduler.ReduceLROnPlateau}"],
    ],
)
def test_a_schedule_that_wants_a_metric_ends_the_first_step(train: Callable[..., Command], typed: list[str]) -> None:
    output = train("model=linear", *typed, "logger=[]", code=1).output
    assert "ReduceLROnPlateau.step() missing 1 required positional argument: 'metrics'" in output
    assert answer("scheduler=plateau") is None


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_plateau_is_torchs(mode: Any) -> None:
    """Two steps an epoch, an evaluation after each."""
    values, ours, plain = [5.0, 4.0, 4.5, 5.5, 5.6, 5.7, 3.0, 2.0], optimizer(), optimizer()
    theirs = lr_scheduler.ReduceLROnPlateau(plain, mode, 0.5, patience=1, min_lr=0.2)
    scheduler = Plateau(ours, mode, factor=0.5, patience=1, threshold=1e-4, min_lr=0.2)
    found, expected = [], []
    for number, value in enumerate(values):
        found += rates(ours, scheduler, range(2 * number, 2 * number + 2))
        scheduler.evaluated(value)
        expected += [[group["lr"] for group in plain.param_groups]] * 2
        theirs.step(value)
    assert found == [pytest.approx(row, rel=1e-12) for row in expected]
    assert found[-1] != found[3]  # it went down


def test_a_run_on_a_plateau_lowers_its_rate_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The objective cannot get better by a share of 100, so the rate is halved after each evaluation but the first."""
    words = ["scheduler=plateau", "scheduler.factor=0.5", "scheduler.patience=0", "scheduler.threshold=100"]
    words += ["model=mlp", "trainer.precision=fp64", "trainer.epochs=5", "trainer.batch_size=500", "logging.every=1"]
    cfg = accepted(*words, "logger=[tensorboard]")
    whole, moved = (with_values(cfg, f"run_dir={tmp_path / name}") for name in ("whole", "moved"))
    in_world(2, train_all, [whole, with_values(moved, "trainer.pause_after=3"), moved])
    assert same_bits(tmp_path / "whole", tmp_path / "moved")
    found = [rate for _, rate in scalars(tmp_path / "whole")["train/lr"]]
    assert found == [rate for _, rate in scalars(tmp_path / "moved")["train/lr"]]
    assert sorted(set(found), reverse=True) == pytest.approx([0.05, 0.025, 0.0125, 0.00625], rel=1e-5)


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 9), nn.ReLU(), nn.Linear(9, 5)).double()


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    inputs = torch.randn(7, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        model(inputs).square().sum().backward()
        for one in optimizers:
            one.step()
        model.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("head", ["muon", "adamw"])
def test_muon_takes_the_matrices_and_adamw_the_rest(head: str) -> None:
    """AdamW beside it is torch's own; a step of a matrix is worked out by hand."""
    adamw = partial(torch.optim.AdamW, lr=0.003, betas=(0.8, 0.9), weight_decay=0.1)
    frozen = net()
    own = [frozen[0].weight, frozen[2].weight, *([frozen[4].weight] if head == "muon" else [])]
    others = [p for p in frozen.parameters() if all(p is not matrix for matrix in own)]
    expected = trained(frozen, adamw(others))
    model = net()
    body, last = list(model.parameters())[:-2], list(model.parameters())[-2:]
    groups: list[Any] = [*body, *last] if head == "muon" else [{"params": body}, {"params": last, "use_muon": False}]
    still = Muon(groups, 1e-15, 0.9, 0.0, 5, False, adamw)
    for found, wanted in zip(trained(model, still), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)

    model = net()
    model(torch.randn(7, 1, 8, 8, dtype=torch.float64)).square().sum().backward()
    weight = model[2].weight
    before, gradient = weight.detach().clone(), weight.grad.clone()
    Muon(model.parameters(), 0.02, 0.9, 0.1, 5, False, adamw).step()
    expected_weight = before * (1 - 0.02 * 0.1) - 0.02 * orthogonalised(gradient, 5)  # wider than high: no factor
    torch.testing.assert_close(weight.detach(), expected_weight, rtol=1e-5, atol=1e-7)


def test_muon_and_a_schedule_of_torch_go_on_where_they_stopped(tmp_path: Path) -> None:
    schedule = "scheduler.schedule={_target_:torch.optim.lr_scheduler.StepLR,step_size:1,gamma:0.5}"
    words = ["optimizer=muon", "scheduler=torch", schedule]
    words += ["model=mlp", "trainer.precision=fp64", "trainer.epochs=3", "trainer.batch_size=200", "logging.every=1"]
    words += [ON_TEST]
    cfg = accepted(*words, "logger=[tensorboard]")
    whole, moved, alone = (with_values(cfg, f"run_dir={tmp_path / name}") for name in ("whole", "moved", "alone"))
    sharded = with_values(accepted(*words, "strategy=fsdp", "logger=[]"), f"run_dir={tmp_path / 'sharded'}")
    in_world(2, train_all, [whole, with_values(moved, "trainer.max_steps=10"), moved, sharded])
    assert same_bits(tmp_path / "whole", tmp_path / "moved")
    assert scalars(tmp_path / "whole")["train/lr"] == scalars(tmp_path / "moved")["train/lr"]
    in_world(1, train_all, [alone])
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "alone")) < 1e-9
    assert distance(weights(tmp_path / "whole"), weights(tmp_path / "sharded")) < 1e-9
    expected = [0.02 * 0.5 ** ((step - 1) // 8) for step in range(1, 25)]
    found = [rate for _, rate in scalars(tmp_path / "whole")["train/lr"]]
    assert found[:-1] == pytest.approx(expected[1:], rel=1e-5)
