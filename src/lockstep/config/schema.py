"""What a config may say: the types of its values, and a frozen dataclass for each section. The values are in conf/.

`lockstep.config.check` compares a composed config with `RunConfig`. The same types stand in the constructors of this
project's own classes, which are checked alike. No torch and no pydantic here.
"""

import re
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt

from lockstep.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf"  # the folder of configs

Node = dict[str, Any]
"""{"_target_": "package.Class", argument: value}, with OmegaConf's own values."""


@dataclass(frozen=True)
class Pattern:
    """A text matches a regular expression as a whole; meaning: what is accepted, in words."""

    regex: str
    meaning: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def check(text: str) -> str:
            if not re.fullmatch(self.regex, text):
                raise PydanticCustomError("pattern", "Input should be {meaning}", {"meaning": self.meaning})
            return text

        return core_schema.no_info_after_validator_function(check, handler(source))


Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
ClassWeights = list[NotNegative] | Literal["balanced"] | None
Names = list[str | int]  # of layers: the name of one may be a whole number
Ranks = Count | Literal["auto", "gpu", "cpu"]
StartMethod = Literal["spawn", "fork", "forkserver"]
Shape = list[Count]
ImageShape = Annotated[list[Count], Len(3, 3)]
Classes = Count
Duration = Annotated[str, Pattern(r"(?!0+(\.0+)?\D)\d+(\.\d+)?\s*(s|min|h)", "a time such as 90s, 30min or 2h")]
Interval = Annotated[str, Pattern(r"(?!0+\D)(\d+)?\s*(epoch|step|min)s?", "epochs, steps or minutes, such as 50steps")]

# What the program passes beside the arguments of a node: how many by position, and which names.
LATER: dict[str, tuple[int, frozenset[str]]] = {
    "optimizer": (1, frozenset()),
    "scheduler": (1, frozenset({"steps_per_epoch", "total_steps", "objective_mode"})),
    "scheduler.schedule": (1, frozenset()),
    "dataset.collate_fn": (1, frozenset()),
}
FROM_DATA = ("shape", "classes")  # null in a node: the training data tells


class Section:
    """Other keys than the fields are refused."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class Trainer(Section):
    epochs: Count
    max_steps: Count | None
    max_time: Duration | None
    pause_after: Count | None
    batch_size: Count
    batch_size_per_rank: Count | None
    gradient_accumulation_steps: Count | Literal["auto"]
    checkpoint_activations: Names
    max_grad_norm: Positive | None
    precision: Literal["fp32", "bf16", "fp16", "fp64", "bf16-true"]
    tf32: bool | None
    channels_last: bool | Literal["auto"]
    compile: bool | Literal["reduce-overhead", "max-autotune"]
    deterministic: bool
    digest: Count | Literal["off", "on"]
    buffers: Literal["auto", "mean", "own"]
    ema: Annotated[float, Gt(0), Lt(1)] | None
    final: Literal["train+val"] | None


@dataclass(frozen=True)
class Parameters(Section):
    init: str | None
    new_layers: Names
    freeze: Names
    no_decay: Names
    groups: list[Node]


@dataclass(frozen=True)
class Evaluation(Section):
    batch_size: Count
    every: Count
    patience: Count | None
    test: Literal["end", "every", "never"]


@dataclass(frozen=True)
class Snapshot(Section):
    every: Interval
    keep_last: Count
    mirror: str | None
    format: Literal["auto", "full", "sharded"]


@dataclass(frozen=True)
class Logging(Section):
    every: Count


@dataclass(frozen=True)
class Watch(Section):
    every: Count
    weights: Literal["stop", "majority", "off"]
    nan: Literal["stop", "skip", "rollback"]
    timeout: Positive | None
    on_hang: Literal["stop", "report"]
    straggler: Annotated[float, Gt(1)] | None


# until issue 42
@dataclass(frozen=True)
class Profiler(Section):
    enabled: bool
    every: Count
    trace_after: Count
    trace_steps: Count


# until issue 45
@dataclass(frozen=True)
class Sweep(Section):
    retry: Literal["failed"] | None
    changes: Literal["refuse", "accept"]
    max_failures: Count | None
    slots: Count | Literal["auto"]
    search: Literal["list", "halving", "random", "tpe", "race"]
    trials: Count | None
    seed: Seed
    constraints: list[str]
    eta: Annotated[int, Ge(2)]
    first_rung: Count
    confidence: Annotated[float, Ge(0.5), Lt(1)]


@dataclass(frozen=True)
class Backend(Section):
    name: Literal["auto", "gloo", "nccl", "mpi"]
    timeout: Annotated[float, Ge(1)]
    socket_ifname: str | None
    debug: str | None
    p2p_disable: bool | None
    ib_disable: bool | None


@dataclass(frozen=True)
class SyncBN(Section):
    mode: Literal["auto", "on", "off"]


# until issue 40
@dataclass(frozen=True)
class Augment(Section):
    pad: Whole
    flip: bool | Literal["alternating"]
    sizes: list[Count] | None


# until issue 40
@dataclass(frozen=True)
class Dataset:
    """What every data set has. Its readers may have other keys beside these."""

    __pydantic_config__: ClassVar = {"extra": "ignore", "allow_inf_nan": False}

    prepare: Node | None
    train: Node
    test: Node
    validation: Positive | Literal["auto"] | Node | None
    split_seed: Seed
    folds: Annotated[int, Ge(2)] | None
    fold: Whole | None
    groups: Literal["auto", "on", "off"]
    shape: Shape | None
    classes: Count | None
    mean: list[float] | None
    std: list[Positive] | None
    augment: Augment
    workers: Whole
    transforms: list[Node]
    test_transforms: list[Node]
    batch_transforms: list[Node]
    collate_fn: Node | None
    sampling: Literal["balanced", "weights"] | None
    on_error: Literal["fail", "skip"]


@dataclass(frozen=True)
class RunConfig(Section):
    """Every value of a run."""

    seed: Seed
    data_dir: str
    run_dir: str
    resume: str | None
    monitor: str | None
    vars: dict[str, Any]
    trainer: Trainer
    parameters: Parameters
    evaluation: Evaluation
    snapshot: Snapshot
    logging: Logging
    watch: Watch
    sweep: Sweep
    profiler: Profiler
    backend: Backend
    sync_bn: SyncBN
    dataset: Dataset
    model: Node
    task: Node
    optimizer: Node
    scheduler: Node
    strategy: Node
    gradient_sync: Node
    launch: Node
    mode: Node
    logger: dict[str, Node]

    @property
    def holds_out(self) -> bool:
        """Whether there is a validation set."""
        data = self.dataset
        return self.trainer.final is None and (data.validation is not None or data.folds is not None)

    @property
    def objective(self) -> str | None:
        """What decides which weights are the best, such as val/accuracy; None: the last ones are the result."""
        if self.monitor == "auto":
            return f"val/{self.task.get('monitor', 'loss')}" if self.holds_out else None
        return self.monitor

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
        """Raise ConfigError for values that would together choose something else than what they say."""
        data, monitor, final, fold = self.dataset, self.monitor or "", self.trainer.final, self.dataset.fold
        size, folds = data.validation, data.folds
        is_plateau = self.scheduler.get("_target_") == "lockstep.training.schedulers.Plateau"
        compared = "compares evaluations, and here nothing is chosen"
        hold_out = "dataset.validation=0.1" if final is None else "trainer.final=null"
        chooses, searches = self.objective is not None, self.sweep.search in ("halving", "tpe", "race")
        own, held_out = isinstance(size, dict), size is not None or folds is not None
        no_share = isinstance(size, float) and size > 1 and size % 1 != 0
        all_folds = f"dataset.fold=0, or -m 'dataset.fold=range(0,{folds})'"
        no_metric = monitor not in ("", "auto") and not monitor.startswith("val/")
        rules = [
            (no_share, f"dataset.validation={size} is no number", "dataset.validation=0.1"),
            (folds and (fold is None or fold >= folds), f"dataset.folds={folds} needs a fold below it", all_folds),
            (fold is not None and not folds, f"dataset.fold={fold} and there are no folds", "dataset.folds=5"),
            (folds and own, "dataset.validation reads other data, without folds", "dataset.validation=0.1"),
            (final and (own or not held_out), f"trainer.final={final}: nothing is held out", "trainer.final=null"),
            (monitor[:5] == "test/", f"monitor={monitor}: the test set chooses nothing", f"monitor=val/{monitor[5:]}"),
            (no_metric, f"monitor={monitor} is not auto, null or val/<a metric of the task>", "monitor=auto"),
            (monitor[:4] == "val/" and not self.holds_out, f"monitor={monitor} needs a validation set", hold_out),
            (self.evaluation.patience and not chooses, f"evaluation.patience {compared}", "evaluation.patience=null"),
            (is_plateau and not chooses, f"scheduler=plateau {compared}", "scheduler=cosine"),
            (searches and not chooses, f"sweep.search={self.sweep.search} {compared}", "sweep.search=list"),
        ]
        for wrong, what, advice in rules:
            if wrong:
                raise ConfigError(f"{what}; type {advice}")


Made = TypeVar("Made")


def build(made: type[Made], values: Node) -> Made:
    """The dataclass of a section from values that are checked: a whole number becomes the float that is declared."""
    hints = get_type_hints(made, include_extras=True)
    return made(**{field.name: _as_declared(hints[field.name], values[field.name]) for field in fields(made)})  # type: ignore[arg-type]


def _as_declared(hint: Any, value: Any) -> Any:
    if is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    if type(value) is int and float in _kinds(hint) and int not in _kinds(hint):
        return float(value)
    if isinstance(value, list):
        items = [get_args(kind)[0] for kind in _kinds(hint) if getattr(kind, "__origin__", None) is list]
        return [_as_declared(items[0], item) for item in value] if items else value
    return value


def _kinds(hint: Any) -> list[Any]:
    """The members of a union, without what is annotated."""
    arguments = get_args(hint)
    if hasattr(hint, "__metadata__"):
        return _kinds(arguments[0])
    if arguments and getattr(hint, "__origin__", None) not in (list, dict, Literal):
        return [kind for member in arguments for kind in _kinds(member)]
    return [hint]
