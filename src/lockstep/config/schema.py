"""What a config may say: the types of its values, and a frozen dataclass for each section. The values are in conf/.

The constructors of this project's own classes have the same types, and are checked alike. No torch and pydantic here.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, Predicate

from lockstep.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf"  # the folder of configs

Node = dict[str, Any]
"""{"_target_": "package.Class", argument: value}, with OmegaConf's own values."""

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
ClassWeights = list[NotNegative] | None
Names = list[str | int]  # of layers: the name of one may be a whole number
Ranks = Count | Literal["auto", "gpu", "cpu"]
StartMethod = Literal["fork", "spawn"]
Shape = list[Count]
Classes = Count


def is_of_images(shape: Shape) -> bool:
    """Whether it is (channels, height, width). Raises ConfigError if not: another model takes such samples."""
    if len(shape) != 3:
        raise ConfigError(f"this model needs images, not samples of shape {shape}; type model=mlp or model=linear")
    if shape[2] in (1, 3, 4) and shape[0] == shape[1] > 4:
        what = f"this model needs images (channels, height, width), and these are {shape}"
        raise ConfigError(f"{what}; return image.permute(2, 0, 1) from __getitem__, or type model=mlp")
    return True


def time_limit(max_time: str | None) -> float:
    """The seconds of trainer.max_time, infinite without it. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", max_time or "")
    seconds = float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]] if match else 0.0
    if max_time is not None and not seconds:
        accepted = "a time such as 90s, 30min or 2h"
        raise ConfigError(f"trainer.max_time={max_time} should be {accepted}; type trainer.max_time=null")
    return seconds or math.inf


def interval(every: str) -> tuple[int, str]:
    """(count, "epoch", "step" or "min") of `snapshot.every`; a unit alone means 1. Raises ConfigError."""
    match = re.fullmatch(r"(?!0+\D)(\d+)?\s*(epoch|step|min)s?", every)
    if match is None:
        accepted = "epochs, steps or minutes, such as 50steps"
        raise ConfigError(f"snapshot.every={every} should be {accepted}; type snapshot.every=1epochs")
    return int(match[1] or 1), match[2]


ImageShape = Annotated[Shape, Predicate(is_of_images)]

# Keys that say where a run computes, what it shows and what it keeps, and not what its numbers are.
NO_NUMBER: tuple[str, ...] = ("run_dir", "data_dir", "resume", "mode", "launch", "backend", "logger", "logging")
NO_NUMBER += ("snapshot", "hydra", "tags", "notes")
SHARED_BY = ("strategy", "gradient_sync", "sync_bn", "watch")  # how ranks share the work: another start may change it

# Nodes whose first argument the program passes, and names of others that it passes.
GET_FIRST = frozenset({"optimizer", "optimizer.others", "scheduler", "scheduler.schedule", "loader.collate_fn"})
GET_FIRST |= {"trainer.ema"}
PASSED = frozenset({"steps_per_epoch", "total_steps", "direction", "epochs"})
FROM_DATA = frozenset({"shape", "classes", "num_classes"})  # null in a node: the training data tells


@dataclass(frozen=True)
class Trainer:
    epochs: Count
    max_steps: Count | None
    max_time: Annotated[str, Predicate(time_limit)] | None
    pause_after: Count | None
    batch_size: Count
    batch_size_per_rank: Count | None
    gradient_accumulation_steps: Count
    checkpoint_activations: Names
    max_grad_norm: Positive | None
    precision: Literal["fp32", "bf16", "fp16", "fp64", "bf16-true"]
    tf32: bool | None
    channels_last: bool | Literal["auto"]
    compile: bool | Literal["reduce-overhead", "max-autotune"]
    deterministic: bool
    ema: Node | None
    profiler: Node | None
    final: Literal["train+val"] | None


@dataclass(frozen=True)
class Parameters:
    init: str | None
    new_layers: Names
    freeze: Names
    no_decay: Names
    groups: list[Node]


@dataclass(frozen=True)
class Evaluation:
    batch_size: Count
    every: Count
    patience: Count | None
    test: Literal["end", "every", "never"]
    metrics: dict[str, Node]


@dataclass(frozen=True)
class Snapshot:
    every: Annotated[str, Predicate(interval)]
    keep_last: Count
    mirror: Node | None


@dataclass(frozen=True)
class Logging:
    every: Count


@dataclass(frozen=True)
class Watch:
    weights_every: Whole
    nan: Literal["stop", "skip"]
    timeout: Positive | None
    on_hang: Literal["stop", "report"]


@dataclass(frozen=True)
class Backend:
    name: Literal["auto", "gloo", "nccl", "mpi"]
    timeout: Annotated[float, Ge(1)]
    threads: Annotated[int, Ge(1), Le(1024)] | None
    socket_ifname: str | None
    debug: str | None
    p2p_disable: bool | None
    ib_disable: bool | None


@dataclass(frozen=True)
class SyncBN:
    mode: Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Loader:
    validation: Count | Annotated[float, Gt(0), Lt(1)] | None
    folds: Annotated[int, Ge(2)] | None
    fold: Whole | None
    split_seed: Seed
    groups: Literal["auto", "off"]
    num_workers: Whole
    transforms: list[Node]
    test_transforms: list[Node]
    batch_transforms: list[Node]
    augment: Node | None
    collate_fn: Node | None
    sampling: Literal["balanced", "weights"] | None


@dataclass(frozen=True)
class RunConfig:
    """Every value of a run."""

    seed: Seed
    data_dir: str
    run_dir: str
    resume: str | None
    monitor: str | None
    tags: list[str]
    notes: str | None
    vars: dict[str, Any]
    trainer: Trainer
    parameters: Parameters
    evaluation: Evaluation
    snapshot: Snapshot
    logging: Logging
    watch: Watch
    backend: Backend
    sync_bn: SyncBN
    loader: Loader
    dataset: Node
    model: Node
    task: Node
    step: Node
    callbacks: list[Node]
    optimizer: Node
    scheduler: Node
    strategy: Node
    gradient_sync: Node
    launch: Node
    mode: Node
    logger: dict[str, Node]

    @property
    def holds_out(self) -> bool:
        """Whether there is a validation set: of the data's own, or held out of the training data."""
        return self.trainer.final is None and (self.loader.validation is not None or self.loader.folds is not None)

    @property
    def chooses(self) -> bool:
        """Whether evaluations decide which weights are the best. Else the last ones are the result."""
        return self.holds_out if self.monitor == "auto" else self.monitor is not None

    def changed(self, values: dict[str, Any]) -> "RunConfig":
        """A copy with other values: {"trainer.epochs": 3, "scheduler": {...}}."""
        config = self
        for key, value in values.items():
            section, _, name = key.partition(".")
            part = getattr(config, section)
            if name:
                value = part | {name: value} if isinstance(part, dict) else replace(part, **{name: value})
            config = replace(config, **{section: value})
        return config

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for values that would together do something else than what they say."""
        trainer, loader, monitor = self.trainer, self.loader, self.monitor or ""
        fold, folds, metric = loader.fold, loader.folds, monitor.partition("/")[2]
        no_fold = folds is not None and (fold is None or fold >= folds)
        all_folds = f"loader.fold=0, or -m 'loader.fold=range(0,{folds})'"
        cannot_choose, right = monitor not in ("", "auto", f"val/{metric}"), f"monitor=val/{metric or 'loss'}"
        no_refit = trainer.final is not None and not (loader.validation or folds)
        no_validation = metric and not self.holds_out
        hold_out = "trainer.final=null" if trainer.final else "loader.validation=0.1"
        plateau = self.scheduler.get("_target_") == "lockstep.training.schedules.Plateau"
        compares = "compares evaluations, and here nothing is chosen; type"
        both = trainer.precision == "fp16" and self.watch.nan == "skip"
        ungrouped = any("match" not in one for one in self.parameters.groups)
        # pytorch issue 169545
        overwrites = trainer.compile == "reduce-overhead" and trainer.gradient_accumulation_steps > 1
        rules = [
            (no_fold, f"loader.folds={folds} needs a fold below it; type {all_folds}"),
            (fold is not None and not folds, f"loader.fold={fold} and there are no folds; type loader.folds=5"),
            (no_refit, f"trainer.final={trainer.final}: nothing is held out; type trainer.final=null"),
            (cannot_choose, f"monitor={monitor}: val/... alone can choose; type {right}, or monitor=auto"),
            (no_validation, f"monitor={monitor} needs a validation set; type {hold_out}"),
            (self.evaluation.patience and not self.chooses, f"evaluation.patience {compares} evaluation.patience=null"),
            (plateau and not self.chooses, f"scheduler=plateau {compares} scheduler=cosine"),
            (both, "watch.nan=skip and the loss scaling of fp16 would both leave out updates; type watch.nan=stop"),
            (ungrouped, "parameters.groups: one has no match; type parameters.groups=[{match:fc,lr:0.1}]"),
            (overwrites, "trainer.compile=reduce-overhead overwrites accumulated gradients; type trainer.compile=true"),
        ]
        for wrong, sentence in rules:
            if wrong:
                raise ConfigError(sentence)
