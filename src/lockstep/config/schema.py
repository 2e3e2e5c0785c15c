"""What an option accepts, said once: by the annotations of its class's constructor, or of its section's dataclass.

    def mlp(shape: Shape, classes: Count, width: Count, dropout: Fraction) -> nn.Module:
        '''Hidden layers of ReLU units.

        width: units of a hidden layer.
        dropout: share of the units that are dropped.
        '''

A type, `Literal` words and `Limits` in `Annotated` are the rule of a parameter; its line in the docstring, or a text in
`Annotated`, is its help. `rules` reads them. The values stand in conf/. No torch here.
"""

import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Node = dict[str, Any]

CONF = Path(__file__).parents[3] / "conf"  # the folder of configs
HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
FROM_DATA = ("shape", "classes")  # null in a config: the training data tells
LARGEST_NUMBER: dict[type, float] = {int: 2**63 - 1, float: sys.float_info.max}
SPELLED_TRUTHS = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}
SPELLED_NULLS = ("", "none", "nil", "nan", "false", "off", "no", "never", "0", "-1")
NUMBER_AND_UNIT = re.compile(r"([-+]?[\d.]+(?:e[-+]?\d+)?)\s*(%|s|sec|seconds?|epochs?|steps?|[a-z]*)", re.IGNORECASE)
IN_NUMBER = ("s", "sec", "second", "seconds", "epoch", "epochs", "step", "steps")  # units that an option's help names
YAML_BOOLEANS = {"False": "off", "True": "on"}  # what YAML makes of off and on without quotes


@dataclass(frozen=True)
class Limits:
    """What a value must be beyond its type.

    min, max: included. above, below: excluded.
    length: of a list.
    pattern: a regular expression for the whole of a text.
    must_be: replaces the description of the accepted values.
    units: of a text that is a number with a unit.
    example: what to type where the value in conf/ does not help, because it is null or left out.
    advice: replaces `key=example` as what to type.
    """

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    length: int | None = None
    pattern: str | None = None
    must_be: str | None = None
    units: tuple[str, ...] | None = None
    example: object = None
    advice: str | None = None


LARGEST_SEED = 2**63 - 1
Count = Annotated[int, Limits(min=1)]
Whole = Annotated[int, Limits(min=0)]
Seed = Annotated[int, Limits(min=0, max=LARGEST_SEED)]
Positive = Annotated[float, Limits(above=0)]
NotNegative = Annotated[float, Limits(min=0)]
Fraction = Annotated[float, Limits(min=0, below=1)]
ClassWeights = Annotated[
    list[NotNegative] | Literal["balanced"] | None,
    Limits(must_be="balanced, or a list with a weight of 0 or more for each class", example="balanced"),
]
Names = Annotated[  # the name of a layer may be a whole number
    list[str | int], Limits(must_be="a list of names", example=["<name>"])
]
Ranks = Annotated[Count | Literal["auto", "gpu", "cpu"], Limits(example=2)]
StartMethod = Literal["spawn", "fork", "forkserver"]
Shape = Annotated[Sequence[int], "Shape of a sample; null: from the data.", Limits(min=1)]
ImageShape = Annotated[
    Shape,
    Limits(length=3, must_be="images of shape [channels,height,width]", advice="model=mlp or model=linear"),
]
Classes = Annotated[int, "Outputs; null: from the data.", Limits(min=1)]


@dataclass(frozen=True)
class Rule:
    """What one option accepts, and how that is said. words: accepted as they are."""

    kinds: tuple[type, ...]  # of int, float, bool, str and dict; empty where only words are accepted
    is_list: bool
    nullable: bool
    words: tuple[object, ...]
    limits: Limits
    help: str
    or_one: bool = False  # whether one item may stand in the place of a list

    @property
    def must_be(self) -> str:
        """The accepted values in words: "a whole number of 1 or more, or null"."""
        text = item = self.limits.must_be or self._describe_item()
        if self.is_list and not self.limits.must_be:
            count = "items" if self.limits.length is None else f"{self.limits.length} items"
            text = f"a list of {count}, each {text}"
            text = f"{item}, or {text}" if self.or_one else text
        return f"{text}, or null" if self.nullable else text

    @property
    def is_number(self) -> bool:
        return int in self.kinds or float in self.kinds

    def accepts(self, value: object) -> bool:
        if value is None:
            return self.nullable
        if not self.is_list or value in self.words or (self.or_one and not isinstance(value, list)):
            return self._accepts_item(value)
        if not isinstance(value, list) or self.limits.length not in (None, len(value)):
            return False
        return all(self._accepts_item(item) for item in value)

    def as_declared(self, value: Any) -> Any:
        """`value` as its class takes it: floats where floats are declared (AdamW refuses betas=[0.9,0]), and off and on
        where YAML has made truth values of them."""
        if isinstance(value, list):
            return [self.as_declared(item) for item in value]
        if type(value) is int and float in self.kinds and self._in_range(value):
            return float(value)
        word = YAML_BOOLEANS.get(str(value))
        return word if word in self.words and bool not in map(type, self.words) else value

    def from_text(self, value: Any) -> Any:
        """The number or truth value that a text stands for, as environment variables hold them; else `value`."""
        number = as_number(value) if self.is_number else None
        truth = {"true": True, "false": False}.get(str(value).lower()) if isinstance(value, str) else None
        return next((found for found in (value, number, truth) if found is not None and self.accepts(found)), value)

    def example(self, default: object = None) -> object:
        """A value that is accepted. default: the value in conf/, which is taken where it can be typed."""
        if self.limits.example is not None:
            return self.limits.example
        if default is not None and "${" not in str(default) and self.accepts(default):
            return default
        if dict in self.kinds and not self.is_list:
            return {"_target_": "<module>.<class>"}
        if self.nullable and not self.words and str not in self.kinds:
            return None
        low = self.limits.min if self.limits.min is not None else (self.limits.above or 0) + 1
        item = self.words[0] if self.words else low if self.is_number else bool in self.kinds or "<text>"
        return [item] * (self.limits.length or 1) if self.is_list else item

    def what_to_type(self, key: str, typed: object = None, default: object = None) -> str:
        """`key=value` with a value near to `typed` that is accepted, or else with an example; or this rule's advice."""
        if self.limits.advice:
            return self.limits.advice
        near = [f"{key}={show(value)}" for value in self._near(typed) if self.accepts(value)]
        if isinstance(typed, list) and len(typed) > 1 and not self.is_list and all(map(self.accepts, typed)):
            return f"-m {key}={','.join(map(show, typed))}"
        if not near and typed is not None and self.words and not (self.is_number or self.is_list or str in self.kinds):
            return f"{key}=<one of them>"  # a word that was not meant may be accepted, and do something else
        return " or ".join(near) or f"{key}={show(self.example(default))}"

    def _near(self, typed: Any) -> Sequence[object]:
        """Values that were probably meant by `typed`; which of them are accepted is for the caller to see."""
        text = str(typed).lower()
        if text in SPELLED_TRUTHS and (bool in self.kinds or True in self.words):
            return [SPELLED_TRUTHS[text]]
        if dict in self.kinds and isinstance(typed, str) and "." in typed:
            return [{"_target_": typed}]
        if self.nullable and text in SPELLED_NULLS:
            return [None]
        if self.is_list:
            return [[typed]] if typed is not None else []
        if isinstance(typed, list) and len(typed) == 1:
            return typed
        if self.is_number and not isinstance(typed, bool):
            return self._near_numbers(typed)
        if self.limits.units and (parts := NUMBER_AND_UNIT.fullmatch(text)) is not None:
            count, unit = parts.groups()
            return [
                f"{count}{known}" for known in self.limits.units if known.startswith(unit) or unit.startswith(known)
            ]
        if self.kinds == (bool,) and not self.words:
            return [True, False]
        letters = [part for part in re.findall(r"[a-z]+|\d+", text) if len(part) > 1]  # 16-mixed, float32
        counts = {word: sum(part in show(word) for part in letters) for word in self.words}
        most = [show(word) for word, count in counts.items() if count == max(counts.values()) > 0]
        meant = [word for word in most if not any(word.startswith(f"{other}-") for other in most)]  # bf16-true
        return meant or (self.words if len(self.words) == 2 and not self.kinds else [])

    def _near_numbers(self, typed: Any) -> Sequence[float]:
        """The number of a text such as 10%, 60s or 1/10; for 2.5, where a whole one belongs, those beside it."""
        number = typed if type(typed) in (int, float) else as_number(typed)
        if number is None and isinstance(typed, str):
            above, slash, below = typed.partition("/")
            dividend, divisor = as_number(above), as_number(below)
            parts = NUMBER_AND_UNIT.fullmatch(typed)
            if slash and dividend is not None and divisor:
                number = dividend / divisor
            elif parts is not None and parts[2] == "%":
                number = round(float(parts[1]) / 100, 12)
            elif parts is not None and parts[2] in IN_NUMBER:
                number = as_number(parts[1])
        if number is None or not abs(number) < LARGEST_SEED:
            return []
        if number == int(number):
            return [int(number)]
        return [number] if float in self.kinds else [math.floor(number), math.ceil(number)]

    def _describe_item(self) -> str:
        names = {bool: ["true", "false"], str: ["text"], dict: ["keys with values"]}
        described = [self._describe_number()] if self.is_number else []
        described += [show(word) for word in self.words]
        described += [name for kind in self.kinds for name in names.get(kind, ())]
        return enumerate_words(described, "or")

    def _describe_number(self) -> str:
        limits, noun = self.limits, "a number" if float in self.kinds else "a whole number"
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
        if any(type(value) is type(word) and value == word for word in self.words):
            return True
        if isinstance(value, str):
            pattern = self.limits.pattern
            return str in self.kinds and value != "" and (pattern is None or re.fullmatch(pattern, value) is not None)
        if isinstance(value, bool | dict):
            return type(value) in self.kinds
        if isinstance(value, int | float):
            return (float in self.kinds or type(value) in self.kinds) and self._in_range(value)
        return False

    def _in_range(self, value: float) -> bool:
        limits, largest = self.limits, LARGEST_NUMBER[float if float in self.kinds else int]
        return (
            -largest <= value <= largest  # no nan, and what torch can hold
            and (limits.min is None or value >= limits.min)
            and (limits.max is None or value <= limits.max)
            and (limits.above is None or value > limits.above)
            and (limits.below is None or value < limits.below)
        )


@cache
def rules(described: Callable[..., Any]) -> dict[str, Rule]:
    """{parameter: rule} of a dataclass, a class or a function, in the order of its parameters.

    A parameter whose annotation no config can hold, such as a tensor, has no rule.
    """
    found: dict[str, Rule] = {}
    help: dict[str, str] = {}
    for function, text in _constructors(described):
        help = _lines(text) | help
        for name, parameter in inspect.signature(function).parameters.items():
            rule = _rule(parameter.annotation)
            if rule is not None and name not in found and parameter.kind is not parameter.VAR_KEYWORD:
                found[name] = rule
    for name in found.keys() & help.keys():
        line = help[name]
        is_word = line.partition(":")[0] in found[name].words  # spawn: a fresh interpreter
        found[name] = replace(found[name], help=line if is_word else line[:1].upper() + line[1:])
    return found


def _constructors(described: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], str]]:
    """(function that takes the parameters, its docstrings). A class has its parents' lines too, and their parameters
    where it passes **options on."""
    if not isinstance(described, type):
        yield described, inspect.getdoc(described) or ""
        return
    passes_on = True
    for kind in described.__mro__[:-1]:
        init = kind.__dict__.get("__init__")
        text = "\n".join(inspect.cleandoc(text or "") for text in (kind.__doc__, getattr(init, "__doc__", "")))
        yield (init if init is not None and passes_on else lambda: None), text
        if init is not None:
            passes_on = passes_on and any(p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values())


def _lines(text: str) -> dict[str, str]:
    """{name: text} of the lines `name: text` in a docstring. A line goes on where the next one is indented."""
    found = re.findall(r"^(\w+): (.+(?:\n[ \t]+\S.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(line.split()) for name, line in found}


def _rule(annotation: Any) -> Rule | None:
    """None for an annotation that no value of a config fits."""
    kinds, words, nullable, is_list, help = list[type](), list[object](), False, False, ""
    limits: dict[str, Any] = {}
    waiting = [annotation]
    while waiting:
        hint = waiting.pop(0)
        origin, members = get_origin(hint), get_args(hint)
        if origin is Annotated:
            waiting.insert(0, members[0])
            for extra in reversed(members[1:]):  # Annotated[Names, Limits()] has those of Names first
                if isinstance(extra, Limits):
                    limits = {name: value for name, value in asdict(extra).items() if value is not None} | limits
                elif isinstance(extra, str):
                    help = help or extra
        elif origin in (Union, types.UnionType):
            waiting[:0] = members
        elif origin is Literal:
            words += members
        elif hint in (None, type(None)):
            nullable = True
        elif isinstance(origin, type) and issubclass(origin, Mapping) or origin is Callable or hint is dict:
            kinds.append(dict)  # what is called is a node with a `_target_`
        elif isinstance(origin, type) and issubclass(origin, Iterable):
            is_list = True
            waiting.insert(0, members[0])
        elif hint in (int, float, bool, str):
            kinds.append(hint)
        elif hint is not Path:
            return None
    or_one = is_list and len(kinds) > len(set(kinds))  # list[str] | str
    return Rule(tuple(dict.fromkeys(kinds)), is_list, nullable, tuple(words), Limits(**limits), help, or_one)


# ---- The sections that always have the same keys


@dataclass(frozen=True)
class Run:
    """The keys at the top."""

    seed: Annotated[Seed, "Seed of the weights, the order of the samples and the augmentations."]
    data_dir: Annotated[str, "Folder of the data sets.", Limits(example="data")]
    resume: Annotated[
        str | None, "A run folder or a snapshot to start from, or to evaluate.", Limits(example="<a run folder>")
    ]
    init: Annotated[
        str | None,
        "File of weights, snapshot or run folder whose weights a run begins with.",
        Limits(example="<a file of weights>"),
    ]
    new_layers: Annotated[Names, "With init: parameters that keep their random weights."]
    freeze: Annotated[Names, "Parameters that are not trained."]
    objective: Annotated[
        str,
        "Decides which weights are the best, and is what a run returns to a sweeper: val/<metric of the task>, or "
        "test/<metric> without a validation set.",
        Limits(pattern=r"(val|test)/.+", must_be="val/<metric> or test/<metric>", example="val/loss"),
    ]
    run_dir: Annotated[
        str, "Folder of this run; type hydra.run.dir=<folder> to choose it.", Limits(example="outputs/my-run")
    ]


@dataclass(frozen=True)
class Trainer:
    epochs: Annotated[Count, "Passes over the training data."]
    max_steps: Annotated[
        Count | None, "End after this many optimizer steps, whatever epochs says.", Limits(example=100)
    ]
    max_time: Annotated[
        str | None,
        "End with an evaluation and a snapshot after this time of training.",
        Limits(
            pattern=r"(?!0+(\.0+)?\D)\d+(\.\d+)?\s*(s|min|h)",
            must_be="a time such as 90s, 30min or 2h",
            units=("s", "min", "h"),
            example="30min",
        ),
    ]
    pause_after: Annotated[
        Count | None, "End with a snapshot after this many epochs; the schedule stays that of epochs."
    ]
    batch_size: Annotated[Count, "Samples of a global batch, over all ranks."]
    batch_size_per_rank: Annotated[
        Count | None, "Replaces batch_size by this times the number of ranks that share a batch.", Limits(example=64)
    ]
    gradient_accumulation_steps: Annotated[
        Count | Literal["auto"],
        "Micro-batches that a global batch is cut into; auto: twice as many whenever a step runs out of memory.",
    ]
    checkpoint_activations: Annotated[
        Names,
        "Blocks of the model that compute again in the backward pass what they would keep in memory for it.",
        Limits(example=["block*"]),
    ]
    max_grad_norm: Annotated[Positive | None, "Clip the norm of the gradient to this."]
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64", "bf16-true"],
        "bf16 and fp16 are autocast; bf16-true: weights and optimizer state, too, in bfloat16.",
    ]
    tf32: Annotated[
        bool | None,
        "Float32 is rounded to 10 bits in matrix products and convolutions on GPUs; null: in convolutions alone.",
    ]
    channels_last: Annotated[Literal["auto", True, False], "Memory layout; auto: for models with convolutions."]
    compile: Annotated[Literal[False, True, "reduce-overhead", "max-autotune"], "torch.compile, or a mode of it."]
    deterministic: Annotated[bool, "Use deterministic algorithms only."]
    digest: Annotated[
        Count | Literal["off", "on"],
        "Steps between two rows of digests of loss, gradients and weights; on: 10.",
        Limits(example="on"),
    ]
    buffers: Annotated[
        Literal["auto", "mean", "own"],
        "Buffers that a step parts on the ranks are averaged, or left; auto: torch's norms averaged, others refused.",
    ]
    ema: Annotated[
        float | None,
        "Decay of a moving average of the weights and running statistics.",
        Limits(above=0, below=1, example=0.999),
    ]
    final: Annotated[
        Literal["train+val"] | None,
        "Train on what dataset.validation holds out, too: nothing is chosen, and the test set is read at the end.",
    ]


@dataclass(frozen=True)
class Evaluation:
    batch_size: Annotated[Count, "Samples of a rank's forward pass."]
    every: Annotated[Count, "Epochs between two evaluations."]
    patience: Annotated[Count | None, "End after this many evaluations without a better objective.", Limits(example=3)]
    test: Annotated[
        Literal["end", "every", "never"],
        "When the test set is read: once, with the weights that were chosen; at every evaluation, too; or not at all.",
    ]


@dataclass(frozen=True)
class Snapshot:
    every: Annotated[
        str,
        "Time between two snapshots, in epochs, steps or minutes.",
        Limits(
            pattern=r"(?!0+\D)(\d+)?\s*(epoch|step|min)s?",
            must_be="epochs, steps or minutes, such as 1epochs, 50steps or 10min",
            units=("epochs", "steps", "min"),
        ),
    ]
    keep_last: Annotated[Count, "Newest snapshots that stay; best.pt stays too."]
    mirror: Annotated[
        str | None,
        "Place that each finished snapshot is copied to, in the background: a URL that fsspec knows.",
        Limits(example="s3://bucket/run1"),
    ]
    format: Annotated[
        Literal["auto", "full", "sharded"], "One file, or one for each rank; auto: by the strategy and the size."
    ]


@dataclass(frozen=True)
class Logging:
    every: Annotated[Count, "Steps between two points of train/running_loss and train/lr, the rate of the next step."]


@dataclass(frozen=True)
class Watch:
    every: Annotated[Count, "Steps between two comparisons of the ranks' weights."]
    weights: Annotated[
        Literal["stop", "majority", "off"],
        "What to do when ranks hold different weights; majority: take those of most.",
    ]
    nan: Annotated[Literal["stop", "skip", "rollback"], "What to do when a loss or a gradient is NaN or infinite."]
    timeout: Annotated[
        Positive | None, "Seconds without progress that are a hang; null: by the median step.", Limits(example=60)
    ]
    on_hang: Annotated[Literal["stop", "report"], "End a run that hangs, or only report it."]
    straggler: Annotated[
        float | None, "Name a rank whose steps take this many times as long.", Limits(above=1, example=1.5)
    ]


@dataclass(frozen=True)
class Profiler:
    enabled: Annotated[bool, "Measure the phases of some steps, and record a trace of a few."]
    every: Annotated[Count, "Steps between two measured ones."]
    trace_after: Annotated[Count, "Steps before the trace."]
    trace_steps: Annotated[Count, "Steps in the trace."]


@dataclass(frozen=True)
class Sweep:
    resume: Annotated[str | None, "The folder of a sweep that goes on.", Limits(example="outputs/multirun/a")]
    retry: Annotated[Literal["failed"] | None, "failed: run the failed jobs of a resumed sweep again."]
    changes: Annotated[Literal["refuse", "accept"], "Whether a sweep goes on with another base config or other code."]
    max_failures: Annotated[Count | None, "End the sweep when so many jobs have failed.", Limits(example=3)]
    slots: Annotated[Count | Literal["auto"], "Jobs at once, each with its own cores or GPUs."]
    search: Annotated[
        Literal["list", "halving", "random", "tpe", "race"],
        "halving: train only the best jobs further; random, tpe: draw jobs; race: more seeds until one wins.",
    ]
    trials: Annotated[Count | None, "Jobs that a search draws, or the most that a race may take.", Limits(example=20)]
    seed: Annotated[Seed, "Seed of what a search draws."]
    preview: Annotated[bool, "Print the jobs that would run, and run and write nothing."]
    constraints: Annotated[
        list[str],
        "What the values of each job must satisfy, other jobs are left out.",
        Limits(example=["optimizer.lr * trainer.epochs <= 10"]),
    ]
    eta: Annotated[int, "Halving: the best 1/eta of a rung go on, to eta times as many epochs.", Limits(min=2)]
    first_rung: Annotated[Count, "Halving: epochs of the first rung."]
    confidence: Annotated[
        float,
        "Race: the probability of naming no winner that is none, however often one looks.",
        Limits(min=0.5, below=1),
    ]


@dataclass(frozen=True)
class Backend:
    name: Annotated[Literal["auto", "gloo", "nccl", "mpi"], "auto: nccl if every rank has a GPU, else gloo."]
    timeout: Annotated[float, "Seconds that a rank waits for another before it fails.", Limits(min=1)]
    socket_ifname: Annotated[str | None, "Network interface for gloo and NCCL.", Limits(example="eth0")]
    debug: Annotated[str | None, "NCCL_DEBUG: WARN, INFO, ...", Limits(example="INFO")]
    p2p_disable: Annotated[bool | None, "NCCL_P2P_DISABLE."]
    ib_disable: Annotated[bool | None, "NCCL_IB_DISABLE."]


@dataclass(frozen=True)
class SyncBN:
    mode: Annotated[Literal["auto", "on", "off"], "Batch norm over the global batch; auto: where the strategy can."]


@dataclass(frozen=True)
class Augment:
    pad: Annotated[Whole, "Random shifts by up to this many pixels."]
    flip: Annotated[
        bool | Literal["alternating"],
        "Random mirror images; alternating: of half of the images in an epoch, of the others in the next.",
    ]
    sizes: Annotated[
        list[Count] | None,
        "Progressive resizing: pixels of the sides of training images, in equal parts of the epochs.",
        Limits(example=[16, 24, 32]),
    ]


Transforms = Annotated[
    list[dict[str, Any]],
    Limits(
        must_be="a list of nodes with a _target_",
        example=[{"_target_": "torchvision.transforms.v2.RandomHorizontalFlip"}],
    ),
]


@dataclass(frozen=True)
class Dataset:
    """What every data set has. Its readers may be the user's own, so other keys are allowed beside these."""

    prepare: Annotated[dict[str, Any] | None, "Called in one process of each machine before any rank reads."]
    validation: Annotated[
        float | Literal["auto"] | dict[str, Any] | None,
        "What is held out of the training data: a share, or a whole number of samples; auto: a folder val/ of images, "
        "else 0.1; a node with a `_target_` reads data of its own; null: the test set decides.",
        Limits(above=0, must_be="a share below 1, a number of samples, auto or a node with a _target_", example=0.1),
    ]
    split_seed: Annotated[Seed, "Seed of what is held out; the seed of the run changes nothing there."]
    folds: Annotated[
        int | None, "In place of validation: the training data in so many parts.", Limits(min=2, example=5)
    ]
    fold: Annotated[Whole | None, "The part that is held out, counted from 0.", Limits(example=0)]
    groups: Annotated[
        Literal["auto", "on", "off"],
        "Samples with one value in the attribute `groups` of the training data stay together; auto: if it has one.",
    ]
    shape: Annotated[Shape | None, "Shape of a sample; null: that of the first one.", Limits(example=[1, 28, 28])]
    classes: Annotated[Count | None, "Outputs of the model; null: as the data has classes."]
    mean: Annotated[list[float] | None, "Mean of each channel, of images scaled to 0..1.", Limits(example=[0.5])]
    std: Annotated[list[Positive] | None, "Standard deviation of each channel.", Limits(example=[0.25])]
    workers: Annotated[Whole, "DataLoader processes of each rank."]
    transforms: Annotated[Transforms, "Transforms of training samples, in this order: nodes with a `_target_`."]
    test_transforms: Annotated[Transforms, "Transforms of test samples, in this order: nodes with a `_target_`."]
    batch_transforms: Annotated[
        Transforms,
        "Transforms of training batches with their targets, on the device.",
        Limits(example=[{"_target_": "lockstep.data.transforms.RandomErasing", "p": 0.25}]),
    ]
    collate_fn: Annotated[
        dict[str, Any] | None,
        "The function that makes (inputs, targets) of a list of samples; null: torch's default.",
    ]
    sampling: Annotated[
        Literal["balanced", "weights"] | None,
        "Draw training samples with replacement; balanced: each class equally; weights: by the data's sample_weights.",
    ]
    on_error: Annotated[
        Literal["fail", "skip"],
        "A sample that cannot be read; skip: the next one is trained on, and it is not evaluated.",
    ]


ImagesShape = Annotated[
    list[int], "Shape of an image.", Limits(min=1, length=3, advice="the command without dataset.shape")
]


@dataclass(frozen=True)
class TenClasses(Dataset):
    shape: ImagesShape
    classes: Annotated[int, "Outputs of the model; the labels are 0 to 9.", Limits(min=10)]


@dataclass(frozen=True)
class Images(Dataset):
    shape: ImagesShape


@dataclass(frozen=True)
class Text(Dataset):
    shape: Annotated[list[int], "Tokens of a sample, as a shape.", Limits(min=1, length=1)]
    classes: Annotated[Count, "Different symbols of the whole text."]


@dataclass(frozen=True)
class RandomPairs(Dataset):
    shape: Annotated[Shape, "Shape of a sample."]
    classes: Annotated[int, "Outputs of the model.", Limits(min=1, max=1)]


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
    "dataset.augment": Augment,
}
DATASETS: dict[str, type] = {  # by the reader of dataset.train; a reader of the user's own makes a Dataset
    "lockstep.data.builtin.digits": TenClasses,
    "lockstep.data.builtin.cifar10": TenClasses,
    "lockstep.data.builtin.mnist": TenClasses,
    "lockstep.data.images.images": Images,
    "lockstep.data.text.training_text": Text,
    "lockstep.data.shard_text.token_windows": Text,
    "lockstep.data.builtin.random_pairs": RandomPairs,
}


# ---- What is not passed to the class that a node names, and classes of torch, whose constructors say no limits


@dataclass(frozen=True)
class OptimizerKeys:
    """Keys of every optimizer, which the optimizer itself does not get."""

    no_decay: Annotated[Names, "Parameters without weight decay.", Limits(example=["bias", "norm"])]
    groups: Annotated[
        list[dict[str, Any]],
        "Hyperparameters of their own for some parameters.",
        Limits(example=[{"match": "fc", "lr": 0.1}]),
    ]


@dataclass(frozen=True)
class SGD:
    lr: Annotated[Positive, "Learning rate."]
    momentum: Annotated[Fraction, "Momentum."]
    nesterov: Annotated[bool, "Nesterov's momentum."]
    weight_decay: Annotated[NotNegative, "Weight decay."]
    fused: Annotated[bool | Literal["auto"] | None, "One kernel for all weights; auto: where torch can."]


@dataclass(frozen=True)
class AdamW:
    lr: Annotated[Positive, "Learning rate."]
    betas: Annotated[list[Fraction], "Decay of the two moments.", Limits(length=2)]
    eps: Annotated[NotNegative, "Added to the denominator."]
    weight_decay: Annotated[NotNegative, "Decoupled weight decay."]
    fused: Annotated[bool | Literal["auto"] | None, "One kernel for all weights; auto: where torch can."]


@dataclass(frozen=True)
class ExponentialLR:
    gamma: Annotated[Positive, "Factor of each change."]


OF_TORCH: dict[str, type] = {
    "torch.optim.SGD": SGD,
    "torch.optim.AdamW": AdamW,
    "torch.optim.lr_scheduler.ExponentialLR": ExponentialLR,
}
KEYS_BESIDE: dict[str, type] = {"optimizer": OptimizerKeys}
NOT_PASSED = {group: frozenset(rules(keys)) for group, keys in KEYS_BESIDE.items()}


# ---- The groups of conf/, and nodes of a config


GROUPS: dict[str, list[str]] = {  # {group: its options}
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("hydra", "local", "experiment")
}


@cache
def values_in_conf(group: str = "", option: str = "config") -> Node:
    """The keys and values of an option as its YAML has them, interpolations unresolved; of conf/config.yaml without."""
    if not group:
        return _read(CONF / "config.yaml")[0]
    found: Node = {}
    written = _all_values_in_conf(group, option)[group]
    for other in written.get("defaults", []):
        if isinstance(other, str) and other in GROUPS[group]:
            found |= values_in_conf(group, other)
    own = {name: value for name, value in written.items() if name != "defaults"}
    merged = OmegaConf.to_container(OmegaConf.merge(found, own), resolve=False)  # of nodes in both, the keys of both
    return cast(Node, merged)


@cache
def _all_values_in_conf(group: str, option: str) -> Node:
    """What the YAML of an option sets: {group: its values}, and values of other groups."""
    written, is_global = _read(CONF / group / f"{option}.yaml")
    return written if is_global else {group: written}


def _read(path: Path) -> tuple[Node, bool]:
    """(values, whether the file says that they are those of the whole config)."""
    text = path.read_text()
    return yaml.safe_load(text) or {}, text.startswith("# @package _global_")


def section_rules(config: Node, section: str) -> dict[str, Rule]:
    """The rules of a section of `config`, of the keys at the top for "". A data set may have its own."""
    if section == "dataset":
        reader = config.get("dataset", {}).get("train")
        return rules(DATASETS.get(str(reader.get("_target_")) if isinstance(reader, dict) else "", Dataset))
    return rules({"": Run, **SECTIONS}[section])


def find_rule(key: str) -> Rule | None:
    """The rule of a key of a section, such as trainer.epochs, or of the top level; None for other keys."""
    section, _, name = key.rpartition(".")
    described = {"": Run, "dataset": Dataset, **SECTIONS}.get(section)
    return rules(described).get(name) if described else None


def default_of(key: str) -> object:
    """The value of a key of a section in conf/config.yaml; None for other keys."""
    return node_at(values_in_conf(), key)


def option_rules(key: str, path: str, target: Callable[..., Any]) -> dict[str, Rule]:
    """The rules of the node `key`, whose `_target_` is `path`. Values for a class of the user's own have none."""
    own = OF_TORCH.get(path, target if path.startswith("lockstep.") else None)
    found = dict(rules(own)) if own is not None else {}
    found |= {name: replace(found[name], nullable=True) for name in FROM_DATA if name in found}
    return found | rules(KEYS_BESIDE[key]) if key in KEYS_BESIDE else found


def rules_of_readers(dataset: Node, readers: Mapping[str, Callable[..., Any]]) -> dict[str, Rule]:
    """{key: rule} of the keys beside the readers, such as dataset.root, which have the names of readers' parameters.

    readers: {"dataset.train": what its `_target_` names, ...}.
    """
    own: dict[str, Rule] = {}
    for half in ("prepare", "test", "train"):
        for key, node in nodes_with_target(dataset.get(half), f"dataset.{half}"):
            if key in readers and node["_target_"].startswith("lockstep."):
                own |= rules(readers[key])
    values = {name for name, value in dataset.items() if not isinstance(value, dict)}
    return {name: rule for name, rule in own.items() if name in values - set(rules(Dataset))}


def rules_in_conf(group: str, option: str) -> dict[str, Rule]:
    """The rules of the keys of an option in conf/. It imports what the option names."""
    from hydra.utils import get_object

    values = values_in_conf(group, option)
    if group in SECTIONS:
        return rules(SECTIONS[group])
    nodes = dict(nodes_with_target(values, group))
    paths = {key: node["_target_"] for key, node in nodes.items()}
    named = {key: get_object(path) for key, path in paths.items()}
    if group == "dataset":
        return rules_of_readers(values, named)
    key = f"{group}.{option}" if group == "logger" else group
    return {name: rule for name, rule in option_rules(key, paths[key], named[key]).items() if name in nodes[key]}


def nodes_in_conf(key: str) -> Iterator[Node]:
    """The node `key` of each option in conf/ that has one. strategy=fsdp has one of the optimizer, without a class."""
    for group, options in GROUPS.items():
        for option in options:
            node = node_at(_all_values_in_conf(group, option), key)
            if isinstance(node, dict):
                yield node


def node_in_conf(key: str, target: str) -> Node:
    """The node `key` of the option in conf/ with this `_target_` there, empty without one."""
    return next((node for node in nodes_in_conf(key) if node.get("_target_") == target), {})


def node_at(config: Node, key: str) -> Any:
    """What stands at a key such as trainer.epochs: None if there is nothing. The whole config for an empty key."""
    node: Any = config
    for name in filter(None, key.split(".")):
        node = node.get(name) if isinstance(node, dict) else None
    return node


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


def with_values(cfg: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """A copy of `cfg` with other values: {"trainer.epochs": 3}."""
    changed = cfg.copy()
    for key, value in values.items():
        OmegaConf.update(changed, key, value, merge=False)
    return changed


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


# ---- Values as text


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
