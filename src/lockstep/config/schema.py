"""The sections of the config that always have the same keys: types, ranges and a line of help for each key.

The values stand in conf/. The options of the groups are in `options.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from lockstep.config.fields import LARGEST_SEED, Rule, choice, names, number, rules, value

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
        example=[{"_target_": "lockstep.data.batch_transforms.RandomErasing", "p": 0.25}],
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
