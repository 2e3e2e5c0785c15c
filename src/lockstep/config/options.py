"""The options of the config groups: for each `_target_` of this project, the keys of its YAML.

A node with a `_target_` of the user's own has no schema, and its values are not checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config.fields import choice, number, value
from lockstep.config.schema import Backend, SyncBN

TARGETS: dict[str, type] = {}  # {_target_: schema}
GROUPS: dict[str, dict[str, type]] = {  # {group: {option: schema}}
    "backend": dict.fromkeys(("auto", "gloo", "nccl", "mpi"), Backend),
    "sync_bn": dict.fromkeys(("auto", "on", "off"), SyncBN),
}
_START_METHODS = "spawn: a fresh interpreter for each rank; fork: a copy of this one; forkserver: a copy of a helper."


def describes(target: str, *names: str) -> Callable[[type], type]:
    """Class decorator: the schema of nodes with this `_target_`, which the options `names` (group/option) have."""

    def register(schema: type) -> type:
        TARGETS[target] = schema
        for name in names:
            group, _, option = name.partition("/")
            GROUPS.setdefault(group, {})[option] = schema
        return schema

    return register


@dataclass
class NoKeys:
    """An option that has nothing to choose."""


def _describe_options_without_keys() -> None:
    hooks = {
        "auto": "auto.Auto",
        "all_reduce": "all_reduce.AllReduce",
        "shared_memory": "shared_memory.SharedMemory",
        "ring": "ring.Ring",
        "parameter_server": "parameter_server.ParameterServer",
        "fp16": "fp16.Float16",
        "bf16": "bf16.BFloat16",
    }
    for name, path in hooks.items():
        describes(f"lockstep.strategies.gradient_sync.{path}", f"gradient_sync/{name}")(NoKeys)
    describes("lockstep.training.schedulers.constant", "scheduler/constant")(NoKeys)
    describes("lockstep.launchers.env.EnvLauncher", "launch/env")(NoKeys)
    describes("lockstep.loggers.console.ConsoleLogger", "logger/console")(NoKeys)
    describes("lockstep.loggers.progress_bar.ProgressBarLogger", "logger/progress_bar")(NoKeys)


_describe_options_without_keys()


def _nproc_per_node() -> Any:
    help = "Ranks on this machine; gpu: as many as GPUs; auto: GPUs, else CPUs."
    return number(help, min=1, example=2, words=("auto", "gpu", "cpu"))


@describes("lockstep.launchers.torchrun.TorchrunLauncher", "launch/torchrun")
@dataclass
class Torchrun:
    start_method: str = choice("forkserver", "spawn", "fork", help=_START_METHODS)
    nproc_per_node: int | str = _nproc_per_node()
    max_restarts: int = number("How often failed ranks are started again.", min=0, example=3)


@describes("lockstep.launchers.spawn.SpawnLauncher", "launch/spawn", "launch/fork")
@dataclass
class Spawn:
    start_method: str = choice("spawn", "fork", "forkserver", help=_START_METHODS)
    nproc_per_node: int | str = _nproc_per_node()
    nnodes: int = number(
        "Machines, for launch=spawn; run the same command on each with its own node_rank.", min=1, example=2
    )
    node_rank: int = number("Number of this machine.", min=0, example=0)
    master_addr: str = value("Address of the machine with node_rank 0.", example="127.0.0.1")
    master_port: int = number("Port there; 0: any free one, for one machine.", min=0, max=65535, example=29500)


@describes("lockstep.launchers.dry.DryLauncher", "launch/dry")
@dataclass
class Dry:
    ranks: int = number("Ranks of the job that is planned.", min=1, example=1024)


@describes("lockstep.launchers.slurm.SlurmLauncher", "launch/slurm")
@dataclass
class Slurm:
    nodes: int = number("Machines.", min=1, example=2)
    ntasks_per_node: int = number("Ranks on each machine.", min=1, example=2)
    cpus_per_task: int | None = number("CPU cores of each rank.", min=1, example=8)
    partition: str | None = value("Partition of the cluster.", example="gpu")
    account: str | None = value("Account that is charged.", example="null")
    time: int | str | None = value(
        "Time limit; null: the partition's own.",
        example=30,
        min=1,
        words=("UNLIMITED", "INFINITE"),
        pattern=r"\d+|\d+(:\d+){1,2}|\d+-\d+(:\d+){0,2}",
        wants="minutes, such as 30, or a time, such as 08:00:00",
    )
    warning: int = number("Seconds before the time limit at which the ranks save.", min=0, example=60)
    options: list[str] = value("More options of sbatch.", example=["--gpus-per-node=2"])
    setup: list[str] = value("Shell lines before srun.", example=["module load cuda"])
    dry_run: bool = value("Print the script and submit nothing.", example=True)
    run_dir: str = value("Folder of this run.", example="${run_dir}")
    overrides: list[str] = value("The overrides that composed this run.", example="${as_typed:${hydra:overrides.task}}")


@describes("lockstep.loggers.tensorboard.TensorBoardLogger", "logger/tensorboard")
@dataclass
class TensorBoard:
    run_dir: str = value("Folder of this run.", example="${run_dir}")
    images: int = number("Test images that an evaluation shows; 0: no images of it.", min=0, example=25)
    histograms: bool = value("Histograms of weights and gradients, at each evaluation.", example=True)
    graph: bool = value("The graph of the model.", example=True)


@describes("lockstep.loggers.csv_logger.CSVLogger", "logger/csv")
@dataclass
class FileLogger:
    run_dir: str = value("Folder of this run.", example="${run_dir}")


@describes("lockstep.tasks.language_modelling.LanguageModelling", "task/language_modelling")
@dataclass
class Task:
    metrics: dict[str, Any] = value(
        "min or max for each metric: whether lower or higher is better.", example={"loss": "min"}
    )
    monitor: str = value(
        "The metric of the default objective, which decides which weights are the best.", example="loss"
    )


@describes("lockstep.tasks.regression.Regression", "task/regression")
@dataclass
class TaskWithOwnParts(Task):
    loss: dict[str, Any] | None = value(
        "A loss of your own in place of the task's.", example={"_target_": "torch.nn.HuberLoss"}
    )
    measures: dict[str, Any] = value("Metrics of your own, by name.", example={"mae": {"_target_": "torch.nn.L1Loss"}})


@describes("lockstep.tasks.classification.Classification", "task/classification")
@dataclass
class Classification(TaskWithOwnParts):
    label_smoothing: float = number("Share of a target that is spread over all classes.", min=0, below=1, example=0.1)


@dataclass
class SmoothedTask(Task):
    label_smoothing: float = number("Share of a target that is spread over all classes.", min=0, below=1, example=0.1)


@describes("lockstep.tasks.multi_label.MultiLabel", "task/multi_label")
@dataclass
class TaskWithCounts(Task):
    classes: int | None = number("Classes, or labels, that are counted; null: as the data has.", min=1, example=10)


@describes("lockstep.tasks.classification_f1.ClassificationF1", "task/classification_f1")
@dataclass
class ClassificationF1(SmoothedTask):
    classes: int | None = number("Classes that are counted; null: as the data has.", min=1, example=10)


@describes("lockstep.tasks.segmentation.Segmentation", "task/segmentation")
@dataclass
class Segmentation(TaskWithCounts):
    ignored_label: int = number("Pixels with this class number count nowhere.", example=255)
