"""The sections of the config: types, ranges and a line of help for each key. How fields say what they accept."""

import re
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

LARGEST_SEED = 2**63 - 1
LARGEST_NUMBER: dict[type, float] = {int: 2**63 - 1, float: sys.float_info.max}


@dataclass(frozen=True)
class Limits:
    """What a field accepts beyond its annotation.

    min, max: included; above, below: excluded. words: strings and truth values that are accepted as they are.
    length: of a list. pattern: a regular expression for the whole of a string. wants: replaces the description of the
    accepted values. advice: replaces `key=example` as what to type.
    """

    help: str
    example: object = None
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    words: tuple[object, ...] = ()
    length: int | None = None
    pattern: str | None = None
    wants: str | None = None
    advice: str | None = None


def value(help: str, **limits: Any) -> Any:
    """A field of a schema dataclass. It has no default: the values stand in conf/. `limits` are those of `Limits`."""
    return field(metadata={"limits": Limits(help, **limits)})


def number(help: str, example: object, **limits: Any) -> Any:
    """A field for a number, or for a list of numbers if the annotation is a list."""
    return value(help, example=example, **limits)


def names(help: str, example: list[str]) -> Any:
    """A field for a list of parameters' names, annotated as list[int]: the name of a layer may be a whole number."""
    return value(help, example=example, pattern=".+", wants="a list of names")


def choice(*words: object, help: str) -> Any:
    """A field that accepts `words` and nothing else. The first is the example."""
    return value(help, example=words[0], words=words)


@dataclass(frozen=True)
class Rule:
    """One field of the schema: what it accepts, and how that is said."""

    kind: type  # int, float, bool, str, dict or object (anything)
    is_list: bool
    nullable: bool
    limits: Limits

    @property
    def wants(self) -> str:
        """The accepted values in words: "a whole number of 1 or more, or null"."""
        text = self.limits.wants or self._describe()
        return f"{text}, or null" if self.nullable else text

    def accepts(self, value: object) -> bool:
        if value is None:
            return self.nullable or self.kind is object
        if not self.is_list:
            return self._accepts_item(value)
        if not isinstance(value, list) or self.limits.length not in (None, len(value)):
            return False
        return all(self._accepts_item(item) for item in value)

    def what_to_type(self, key: str) -> str:
        """`key=example`, or the advice of this field."""
        return self.limits.advice or f"{key}={show(self.limits.example)}"

    def _describe(self) -> str:
        item = self._describe_item()
        if not self.is_list:
            return item
        count = "items" if self.limits.length is None else f"{self.limits.length} items"
        return f"a list of {count}, each {item}"

    def _describe_item(self) -> str:
        words = [show(word) for word in self.limits.words]
        if self.kind in (int, float):
            words.insert(0, self._describe_number())
        elif not words:
            words = {bool: ["true", "false"], str: ["text"], dict: ["keys with values"], object: ["any value"]}[
                self.kind
            ]
        return enumerate_words(words, "or")

    def _describe_number(self) -> str:
        limits = self.limits
        noun = "a whole number" if self.kind is int else "a number"
        if limits.above is not None and limits.below is not None:
            return f"{noun} between {limits.above} and {limits.below}, both excluded"
        if limits.min is not None and limits.below is not None:
            return f"{noun} from {limits.min} to less than {limits.below}"
        if limits.min is not None and limits.min == limits.max:
            return str(limits.min)
        if limits.min is not None and limits.max is not None:
            return f"{noun} from {limits.min} to {limits.max}"
        if limits.min is not None:
            return f"{noun} of {limits.min} or more"
        return noun if limits.above is None else f"{noun} above {limits.above}"

    def _accepts_item(self, value: object) -> bool:
        if any(type(value) is type(word) and value == word for word in self.limits.words):
            return True
        if self.limits.pattern is not None and isinstance(value, str):
            return re.fullmatch(self.limits.pattern, value) is not None
        if self.kind is int:
            return type(value) is int and self._in_range(value)
        if self.kind is float:
            return type(value) in (int, float) and self._in_range(value)  # type: ignore[arg-type]
        if self.limits.words:
            return False
        if self.kind is str:
            return isinstance(value, str) and value != ""
        return isinstance(value, self.kind)

    def _in_range(self, value: float) -> bool:
        limits = self.limits
        return (
            -LARGEST_NUMBER[self.kind] <= value <= LARGEST_NUMBER[self.kind]  # no nan, and what torch can hold
            and (limits.min is None or value >= limits.min)
            and (limits.max is None or value <= limits.max)
            and (limits.above is None or value > limits.above)
            and (limits.below is None or value < limits.below)
        )


def rules(schema: type) -> dict[str, Rule]:
    """{name: rule} of a schema dataclass, in the order of its fields."""
    hints = get_type_hints(schema)
    return {item.name: _rule(item, hints[item.name]) for item in fields(schema)}


def _rule(item: Field[Any], hint: Any) -> Rule:
    members = list(get_args(hint)) if isinstance(hint, types.UnionType) else [hint]
    nullable = type(None) in members
    limits: Limits = item.metadata["limits"]
    kinds = [member for member in members if member is not type(None)]
    is_list = get_origin(kinds[0]) is list
    kind = get_args(kinds[0])[0] if is_list else kinds[0]
    kind = get_origin(kind) or kind
    return Rule(object if kind is Any else kind, is_list, nullable, limits)


def show(value: object) -> str:
    """A value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value)) if abs(value) < 1e15 else str(value)
    if isinstance(value, list):
        return f"[{','.join(show(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


def as_number(value: object) -> int | float | None:
    """The number that a text is, None for other texts and values."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value) if isinstance(value, str) else None
    return None


def enumerate_words(words: list[str], conjunction: str) -> str:
    """["a", "b", "c"] -> "a, b or c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


CONF = Path(__file__).parents[3] / "conf"  # the folder of configs
SCHEMA_NAME = "lockstep_schema"  # its name in the defaults list of conf/config.yaml


@dataclass
class Run:
    """The keys at the top."""

    seed: int = number(
        "Seed of the weights, the order of the samples and the augmentations.", example=0, min=0, max=LARGEST_SEED
    )
    data_dir: str = value("Folder of the data sets.", example="data")
    resume: str | None = value("A run folder or a snapshot to start from, or to evaluate.", example="null")
    init: str | None = value("File of weights, snapshot or run folder whose weights a run begins with.", example="null")
    new_layers: list[int] = names("With init: parameters that keep their random weights.", example=["fc"])
    freeze: list[int] = names("Parameters that are not trained.", example=["layer1"])
    objective: str = value(
        "Decides which weights are the best, and is what a run returns to a sweeper: test/<metric of the task>.",
        example="test/loss",
    )
    run_dir: str = value("Folder of this run; type hydra.run.dir=<folder> to choose it.", example="outputs/my-run")


@dataclass
class Trainer:
    epochs: int = number("Passes over the training data.", min=1, example=5)
    max_steps: int | None = number("End after this many optimizer steps, whatever epochs says.", min=1, example=100)
    pause_after: int | None = number(
        "End with a snapshot after this many epochs; the schedule stays that of epochs.", min=1, example=1
    )
    batch_size: int = number("Samples of a global batch, over all ranks.", min=1, example=128)
    batch_size_per_rank: int | None = number(
        "Replaces batch_size by this times the number of ranks that share a batch.", min=1, example=64
    )
    gradient_accumulation_steps: int = number("Micro-batches that a global batch is cut into.", min=1, example=2)
    max_grad_norm: float | None = number("Clip the norm of the gradient to this.", above=0, example=1.0)
    precision: str = choice("fp32", "bf16", "fp16", "fp64", help="bf16 and fp16 are autocast.")
    channels_last: bool | str = choice("auto", True, False, help="Memory layout; auto: for models with convolutions.")
    compile: bool | str = choice(False, True, "reduce-overhead", "max-autotune", help="torch.compile, or a mode of it.")
    deterministic: bool = value("Use deterministic algorithms only.", example=True)
    digest: int | bool | str = number(  # bool: on and off without quotes in a YAML file, see switches.py
        "Steps between two rows of digests of loss, gradients and weights; on: 10.",
        min=1,
        words=("off", "on"),
        example="on",
    )
    ema: float | None = number(
        "Decay of a moving average of the weights and running statistics.", above=0, below=1, example=0.999
    )


@dataclass
class Evaluation:
    batch_size: int = number("Samples of a rank's forward pass.", min=1, example=128)
    every: int = number("Epochs between two evaluations.", min=1, example=1)
    patience: int | None = number("End after this many evaluations without a better objective.", min=1, example=3)


@dataclass
class Snapshot:
    every: str = value(
        "Time between two snapshots, in epochs, steps or minutes.",
        example="1epochs",
        pattern=r"(?!0+\D)(\d+)?\s*(epoch|step|min)s?",
        wants="epochs, steps or minutes, such as 1epochs, 50steps or 10min",
    )
    keep_last: int = number("Newest snapshots that stay; best.pt stays too.", min=1, example=3)
    format: str = choice(
        "auto", "full", "sharded", help="One file, or one for each rank; auto: by the strategy and the size."
    )


@dataclass
class Logging:
    every: int = number("Steps between two points of train/running_loss and train/lr.", min=1, example=10)


@dataclass
class Watch:
    every: int = number("Steps between two comparisons of the ranks' weights.", min=1, example=100)
    weights: str = choice(
        "stop", "majority", "off", help="What to do when ranks hold different weights; majority: take those of most."
    )
    nan: str = choice("stop", "skip", "rollback", help="What to do when a loss or a gradient is NaN or infinite.")
    timeout: float | None = number(
        "Seconds without progress that are a hang; null: by the median step.", above=0, example=60
    )
    on_hang: str = choice("stop", "report", help="End a run that hangs, or only report it.")
    straggler: float | None = number("Name a rank whose steps take this many times as long.", above=1, example=1.5)


@dataclass
class Profiler:
    enabled: bool = value("Measure the phases of some steps, and record a trace of a few.", example=True)
    every: int = number("Steps between two measured ones.", min=1, example=101)
    trace_after: int = number("Steps before the trace.", min=1, example=10)
    trace_steps: int = number("Steps in the trace.", min=1, example=3)


@dataclass
class Sweep:
    resume: str | None = value("The folder of a sweep that goes on.", example="outputs/multirun/a")
    retry: str | None = choice("failed", help="failed: run the failed jobs of a resumed sweep again.")
    changes: str = choice("refuse", "accept", help="Whether a sweep goes on with another base config or other code.")
    max_failures: int | None = number("End the sweep when so many jobs have failed.", min=1, example=3)
    slots: int | str = number("Jobs at once, each with its own cores or GPUs.", min=1, words=("auto",), example="auto")
    search: str = choice(
        "list", "halving", "random", "tpe", help="halving: train only the best jobs further; random, tpe: draw jobs."
    )
    trials: int | None = number("Jobs that a search draws.", min=1, example=20)
    seed: int = number("Seed of what a search draws.", min=0, max=LARGEST_SEED, example=0)
    constraints: list[str] = value(
        "What the values of each job must satisfy, other jobs are left out.",
        example=["optimizer.lr * trainer.epochs <= 10"],
    )
    eta: int = number("Halving: the best 1/eta of a rung go on, to eta times as many epochs.", min=2, example=2)
    first_rung: int = number("Halving: epochs of the first rung.", min=1, example=1)


@dataclass
class Backend:
    name: str = choice("auto", "gloo", "nccl", "mpi", help="auto: nccl if every rank has a GPU, else gloo.")
    timeout: float = number("Seconds that a rank waits for another before it fails.", min=1, example=300)
    socket_ifname: str | None = value("Network interface for gloo and NCCL.", example="eth0")
    debug: str | None = value("NCCL_DEBUG: WARN, INFO, ...", example="INFO")
    p2p_disable: bool | None = value("NCCL_P2P_DISABLE.", example=True)
    ib_disable: bool | None = value("NCCL_IB_DISABLE.", example=True)


@dataclass
class SyncBN:
    mode: str = choice("auto", "on", "off", help="Batch norm over the global batch; auto: where the strategy can.")


def _transforms(of: str) -> Any:
    return value(
        f"Transforms {of}, in this order: nodes with a `_target_`.",
        wants="a list of nodes with a _target_",
        example=[{"_target_": "torchvision.transforms.v2.RandomHorizontalFlip"}],
    )


@dataclass
class Dataset:
    """What every data set has. Its readers may be the user's own, so other keys are allowed beside these."""

    prepare: dict[str, Any] | None = value(
        "Called in one process of each machine before any rank reads.", example="null"
    )
    shape: list[int] | None = number("Shape of a sample; null: that of the first one.", min=1, example=[1, 28, 28])
    classes: int | None = number("Outputs of the model; null: as the data has classes.", min=1, example=10)
    mean: list[float] | None = number("Mean of each channel, of images scaled to 0..1.", example=[0.5])
    std: list[float] | None = number("Standard deviation of each channel.", above=0, example=[0.25])
    workers: int = number("DataLoader processes of each rank.", min=0, example=2)
    transforms: list[dict[str, Any]] = _transforms("of training samples")
    test_transforms: list[dict[str, Any]] = _transforms("of test samples")
    batch_transforms: list[dict[str, Any]] = value(
        "Transforms of training batches with their targets, on the device.",
        wants="a list of nodes with a _target_",
        example=[{"_target_": "lockstep.data.transforms.RandomErasing", "p": 0.25}],
    )
    collate_fn: dict[str, Any] | None = value(
        "The function that makes (inputs, targets) of a list of samples; null: torch's default.", example="null"
    )
    on_error: str = choice(
        "fail", "skip", help="A sample that cannot be read; skip: the next one is trained on, and it is not evaluated."
    )


@dataclass
class Augment:
    pad: int = number("Random shifts by up to this many pixels.", min=0, example=4)
    flip: bool = value("Random mirror images.", example=True)


# Sections that are complete: a key that they do not have is refused when the config is composed.
SECTIONS: dict[str, type] = {
    "trainer": Trainer,
    "evaluation": Evaluation,
    "snapshot": Snapshot,
    "logging": Logging,
    "watch": Watch,
    "profiler": Profiler,
    "sweep": Sweep,
    "backend": Backend,
    "sync_bn": SyncBN,
}
# Sections beside which the user's own keys may stand.
OPEN_SECTIONS: dict[str, type] = {"dataset": Dataset, "dataset.augment": Augment}


def find_rule(key: str) -> Rule | None:
    """The rule of a key of a fixed section, such as trainer.epochs, or of the top level; None for other keys."""
    section, _, name = key.rpartition(".")
    schema = {"": Run, **SECTIONS, **OPEN_SECTIONS}.get(section)
    return rules(schema).get(name) if schema else None


def register_schema() -> None:
    """Tell Hydra the types of `SECTIONS`. Must run before a config is composed."""
    ConfigStore.instance().store(name=SCHEMA_NAME, node=dict(SECTIONS), provider="lockstep")


Node = dict[str, Any]
HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})


def nodes_with_target(node: object, key: str = "") -> Iterator[tuple[str, Node]]:
    """(key, node) of every node with a `_target_` inside `node`, itself included."""
    if isinstance(node, list):
        for index, child in enumerate(node):
            yield from nodes_with_target(child, f"{key}[{index}]")
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield key, node
        for name, child in node.items():
            yield from nodes_with_target(child, join(key, name))


def as_dict(cfg: DictConfig | Node) -> Node:
    """A config as plain dicts and lists, interpolations resolved where they can be. A plain dict as it is."""
    if isinstance(cfg, dict):
        return cfg
    try:
        container = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException:
        container = OmegaConf.to_container(cfg, resolve=False)
    return cast(Node, container)


def join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"trainer.epochs": 5, ...}: the values of a config by their full keys."""
    if not isinstance(node, dict | DictConfig):
        return {prefix: list(node) if isinstance(node, ListConfig) else node}
    values = {}
    for name, child in node.items():
        values.update(flatten(child, join(prefix, name)))
    return values
