"""The options of the groups optimizer and scheduler: the keys of their YAML. As `options.py`."""

from dataclasses import dataclass
from typing import Any

from lockstep.config.fields import choice, names, number, value
from lockstep.config.options import describes


@dataclass
class ParameterRules:
    """Keys of every optimizer, which the optimizer itself does not get."""

    no_decay: list[int] = names("Parameters without weight decay.", example=["bias", "norm"])
    groups: list[dict[str, Any]] = value(
        "Hyperparameters of their own for some parameters.", example=[{"match": "fc", "lr": 0.1}]
    )


@describes("torch.optim.SGD", "optimizer/sgd")
@dataclass
class SGD(ParameterRules):
    lr: float = number("Learning rate.", above=0, example=0.05)
    momentum: float = number("Momentum.", min=0, below=1, example=0.9)
    nesterov: bool = value("Nesterov's momentum.", example=True)
    weight_decay: float = number("Weight decay.", min=0, example=0.0001)
    fused: bool | None = value("One kernel for all weights.", example=False)


@describes("torch.optim.AdamW", "optimizer/adamw")
@dataclass
class AdamW(ParameterRules):
    lr: float = number("Learning rate.", above=0, example=0.002)
    betas: list[float] = number("Decay of the two moments.", min=0, below=1, length=2, example=[0.9, 0.999])
    eps: float = number("Added to the denominator.", min=0, example=1e-8)
    weight_decay: float = number("Decoupled weight decay.", min=0, example=0.01)
    fused: bool | None = value("One kernel for all weights.", example=False)


@describes("lockstep.training.optimizers.MuonWithAdamW", "optimizer/muon")
@dataclass
class Muon(ParameterRules):
    lr: float = number("Learning rate of the matrices.", above=0, example=0.02)
    momentum: float = number("Momentum of the matrices.", min=0, below=1, example=0.95)
    weight_decay: float = number("Decoupled weight decay.", min=0, example=0.01)
    adamw_lr: float = number("Learning rate of all other parameters.", above=0, example=0.002)
    betas: list[float] = number("AdamW's decay of the two moments.", min=0, below=1, length=2, example=[0.9, 0.999])
    fused: bool | None = value("One kernel for all weights of AdamW.", example=False)


@describes("lockstep.training.optimizers.MuonWithSGD", "optimizer/muon_sgd")
@dataclass
class MuonSGD(ParameterRules):
    lr: float = number("Learning rate of the filters and matrices.", above=0, example=0.1)
    momentum: float = number("Momentum of the filters and matrices.", min=0, below=1, example=0.6)
    steps: int = number("Steps of the Newton-Schulz iteration.", min=1, example=5)
    sgd_lr: float = number("Learning rate of all other parameters.", above=0, example=0.05)
    sgd_momentum: float = number("Momentum of all other parameters.", min=0, below=1, example=0.9)
    weight_decay: float = number("Weight decay of all other parameters.", min=0, example=0.0001)


@describes("lockstep.training.schedulers.AnySchedule", "scheduler/torch")
@dataclass
class AnySchedule:
    schedule: dict[str, Any] = value("The schedule's _target_ and its arguments.", example={})
    every: str = choice("epoch", "step", help="When the schedule moves on.")
    warmup_epochs: float = number("Epochs in which the learning rate rises to the schedule's.", min=0, example=0.5)


@describes("lockstep.training.schedulers.Plateau", "scheduler/plateau")
@dataclass
class Plateau:
    factor: float = number("Factor of each change.", above=0, below=1, example=0.1)
    patience: int = number("Evaluations without a better objective that are waited for.", min=0, example=3)
    threshold: float = number("Share of the best value by which a better one differs from it.", min=0, example=1e-4)
    min_lr: float = number("The learning rate falls no lower.", min=0, example=0.0)
    warmup_epochs: float = number("Epochs in which the learning rate rises to optimizer.lr.", min=0, example=0.5)


@describes("torch.optim.lr_scheduler.ExponentialLR")
@dataclass
class ExponentialLR:
    gamma: float = number("Factor of each change.", above=0, example=0.9)


@describes("lockstep.training.schedulers.linear_decay", "scheduler/linear_decay")
@describes("lockstep.training.schedulers.cosine", "scheduler/cosine")
@dataclass
class WarmupAndDecay:
    warmup_epochs: float = number("Epochs in which the learning rate rises to optimizer.lr.", min=0, example=0.5)
    final_lr_ratio: float = number("Learning rate at the end, as a share of optimizer.lr.", min=0, example=0.0)


@describes("lockstep.training.schedulers.step", "scheduler/step")
@dataclass
class Step:
    step_epochs: float = number("Epochs between two changes of the learning rate.", above=0, example=2)
    gamma: float = number("Factor of each change.", above=0, example=0.1)


@describes("lockstep.training.schedulers.one_cycle", "scheduler/one_cycle")
@dataclass
class OneCycle:
    pct_start: float = number("Share of the run in which the learning rate rises.", above=0, below=1, example=0.3)
