"""The options of the config groups: for each `_target_` of this project, the keys of its YAML.

A node with a `_target_` of the user's own has no schema, and its values are not checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config.schema import LARGEST_SEED, Backend, Dataset, SyncBN, choice, names, number, value

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


@describes("lockstep.launchers.local.TorchrunLauncher", "launch/torchrun")
@dataclass
class Torchrun:
    start_method: str = choice("forkserver", "spawn", "fork", help=_START_METHODS)
    nproc_per_node: int | str = _nproc_per_node()
    max_restarts: int = number("How often failed ranks are started again.", min=0, example=3)


@describes("lockstep.launchers.local.SpawnLauncher", "launch/spawn", "launch/fork")
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


@describes("lockstep.tasks.classification.ClassificationF1", "task/classification_f1")
@dataclass
class ClassificationF1(SmoothedTask):
    classes: int | None = number("Classes that are counted; null: as the data has.", min=1, example=10)


@describes("lockstep.tasks.segmentation.Segmentation", "task/segmentation")
@dataclass
class Segmentation(TaskWithCounts):
    ignored_label: int = number("Pixels with this class number count nowhere.", example=255)


_ADVICE_FOR_IMAGES = "model=mlp or model=linear"


@describes("lockstep.models.linear.linear", "model/linear")
@dataclass
class Model:
    shape: list[int] | None = number("Shape of a sample; null: from the data.", min=1, example=[1, 28, 28])
    classes: int | None = number("Outputs; null: from the data.", min=1, example=10)


@dataclass
class ImageModel(Model):
    shape: list[int] | None = number(
        "Shape of an image; null: from the data.",
        min=1,
        length=3,
        example=[1, 28, 28],
        wants="images of shape [channels,height,width]",
        advice=_ADVICE_FOR_IMAGES,
    )


describes("lockstep.models.convnet.convnet", "model/convnet")(ImageModel)


@describes("lockstep.models.torchvision_model.torchvision_model", "model/resnet18")
@dataclass
class TorchvisionModel(ImageModel):
    name: str = value("Any classification model of torchvision.", example="resnet50")


@describes("lockstep.models.airbench.airbench", "model/airbench")
@dataclass
class Airbench(ImageModel):
    widths: list[int] = number("Channels of the three blocks.", min=1, length=3, example=[64, 256, 256])
    views: str = choice(
        "one", "mirrored", "mirrored_and_shifted", help="Views of an image that an evaluation averages over: 1, 2 or 6."
    )


@describes("lockstep.models.toy_parallel.toy_parallel", "model/toy_parallel")
@dataclass
class ToyParallel(Model):
    width: int = number("Units of the hidden layer.", min=1, example=128)


@describes("lockstep.models.mlp.mlp", "model/mlp")
@dataclass
class MLP(Model):
    width: int = number("Units of a hidden layer.", min=1, example=128)
    depth: int = number("Hidden layers.", min=0, example=2)
    dropout: float = number("Share of the units that are dropped.", min=0, below=1, example=0.1)


@describes("lockstep.models.gpt.gpt", "model/gpt")
@dataclass
class GPT(Model):
    layers: int = number("Blocks of attention and MLP.", min=1, example=4)
    heads: int = number("Heads of each attention; divides width.", min=1, example=4)
    width: int = number("Numbers of a token inside the model.", min=1, example=128)
    dropout: float = number("Share of the numbers that are dropped.", min=0, below=1, example=0.2)
    tied: bool = value("The output layer uses the weights of the token embedding.", example=True)


@describes("lockstep.strategies.ddp.DDP", "strategy/ddp")
@dataclass
class DDP:
    gradient_as_bucket_view: bool = value("Gradients lie in the buffers that are sent.", example=True)
    static_graph: bool = value("Every step uses the same parameters.", example=True)
    bucket_cap_mb: float = number("Megabytes of gradients that are sent at once.", above=0, example=25)
    find_unused_parameters: bool = value("Some parameters get no gradient in some steps.", example=True)


@describes("lockstep.strategies.model_parallel.ModelParallel", "strategy/model_parallel")
@dataclass
class ModelParallel(DDP):
    devices: int = number("Devices of each rank.", min=1, example=2)


@describes("lockstep.strategies.data_parallel.DataParallel", "strategy/data_parallel")
@dataclass
class DataParallel:
    first_share: float = number("The first GPU's samples relative to another's.", above=0, example=0.5)


@describes("lockstep.strategies.fsdp.FSDP", "strategy/fsdp")
@dataclass
class FSDP:
    replicas: int = number("Groups of ranks with a model each, in parts.", min=1, example=1)
    reshard_after_forward: bool = value("Free gathered weights until the backward pass.", example=True)
    wrap_classes: list[str] = value("Class names of the blocks to gather one at a time.", example=["BasicBlock"])
    wrap_min_parameters: int = number("Smaller blocks are gathered with their parent.", min=1, example=1)


@describes("lockstep.strategies.tensor_parallel.TensorParallel", "strategy/tensor_parallel")
@dataclass
class TensorParallel:
    replicas: int = number("Groups of ranks with a model each, that share a batch.", min=1, example=1)
    plan: list[dict[str, Any]] = value(
        "How layers are cut: colwise, rowwise, gathered, or a ParallelStyle of torch, by the name of a module.",
        wants="a list of names of modules, each with a style",
        example=[{"*.widen": "colwise"}, {"*.projection": "rowwise"}],
    )


@describes("lockstep.strategies.pipeline.Pipeline", "strategy/pipeline")
@dataclass
class Pipeline:
    schedule: str = choice("1F1B", "GPipe", help="Order of the forward and backward passes.")
    micro_batches: int = number("Parts of a global batch that are in the pipeline.", min=1, example=4)


@describes("lockstep.strategies.virtual_ranks.VirtualRanks", "strategy/virtual_ranks")
@dataclass
class VirtualRanks:
    count: int = number("Parts of a global batch, a multiple of the number of ranks.", min=1, example=4)


@describes("lockstep.training.async_parameter_server.AsyncParameterServer", "strategy/async_parameter_server")
@dataclass
class AsyncParameterServer:
    sync_every: int = number("Optimizer steps after which all ranks synchronise.", min=1, example=100)


@describes("lockstep.strategies.gradient_sync.LocalSGD", "gradient_sync/local_sgd")
@dataclass
class LocalSGD:
    sync_every: int = number("Steps between two averages of the weights.", min=1, example=8)


@describes("lockstep.strategies.gradient_sync.PowerSGD", "gradient_sync/powersgd")
@dataclass
class PowerSGD:
    rank: int = number("Rank of the matrices that approximate the gradients.", min=1, example=2)
    start_step: int = number("Steps of plain all-reduce at first.", min=2, example=10)
    min_compression: float = number("A matrix that shrinks by less is sent whole.", above=0, example=2)
    epsilon: float = number("Added to the norms when matrices are orthogonalised.", min=0, example=1e-8)


DATASETS: dict[str, type] = {}  # {_target_ of dataset.train: schema of the node dataset}


def reads(target: str, *options: str) -> Callable[[type], type]:
    """Class decorator: the schema of the node dataset if the `_target_` of dataset.train is `target`."""

    def register(schema: type) -> type:
        DATASETS[target] = schema
        GROUPS.setdefault("dataset", {}).update(dict.fromkeys(options, schema))
        return schema

    return register


@reads("lockstep.data.builtin.digits", "digits")
@reads("lockstep.data.builtin.cifar10", "cifar10")
@dataclass
class TenClasses(Dataset):
    shape: list[int] = number(
        "Shape of an image.", min=1, length=3, example=[1, 28, 28], advice="the command without dataset.shape"
    )
    classes: int = number("Outputs of the model; the labels are 0 to 9.", min=10, example=10)


@reads("lockstep.data.builtin.mnist", "mnist", "fashion_mnist")
@dataclass
class MNIST(TenClasses):
    name: str = value("Folder of the files inside data_dir.", example="MNIST")


@reads("lockstep.data.images.image_folder", "image_folder")
@dataclass
class ImageFolder(Dataset):
    root: str = value("Folder that holds train/<class>/*.jpg and test/<class>/*.jpg.", example="data")
    test_split: str = value("Folder in root of the test images.", example="val")
    size: int = number("Pixels of the square that each image is resized and cropped to.", min=1, example=224)
    cache: str = choice("auto", "on", "off", help="Keep the decoded pixels in a file; auto: where that can be done.")
    cache_dir: str = value("Folder of the decoded pixels.", example="data/decoded")
    cache_limit: float = number("GB of decoded pixels of each half; more are not kept.", above=0, example=16)
    shape: list[int] = number("Shape of an image.", min=1, length=3, example=[3, 224, 224])
    classes: int | None = number("Folders in train/; null: as many as there are.", min=1, example=2)


@reads("lockstep.data.builtin.random_pairs", "random")
@dataclass
class RandomPairs(Dataset):
    samples: int = number("Pairs in each half.", min=1, example=2048)
    features: int = number("Numbers in a sample.", min=1, example=20)
    shape: list[int] = number("Shape of a sample.", min=1, example=[20])
    classes: int = number("Outputs of the model.", min=1, max=1, example=1)


@reads("lockstep.data.text.training_text", "text")
@dataclass
class Text(Dataset):
    path: str = value("The text file.", example="my.txt")
    symbols: str = choice("characters", "bytes", help="What a token is.")
    block: int = number("Tokens of a sample.", min=1, example=64)
    samples: int | None = number("Samples that an epoch draws; null: as many as fit side by side.", min=1, example=6000)
    shape: list[int] = number("Tokens of a sample, as a shape.", min=1, length=1, example=[64])
    classes: int = number("Different symbols of the whole text.", min=1, example=65)


@describes("lockstep.data.builtin.digits")
@dataclass
class Half:
    train: bool = value("Whether this is the training data.", example=True)


@describes("lockstep.data.builtin.cifar10")
@dataclass
class FilesReader(Half):
    data_dir: str = value("Folder of the data sets.", example="data")


@describes("lockstep.data.builtin.mnist")
@dataclass
class MNISTReader(FilesReader):
    name: str = value("Folder of the files inside data_dir.", example="MNIST")


@describes("lockstep.data.images.ImageFolder")
@dataclass
class ImageFolderReader:
    root: str = value("As dataset.root.", example="data")
    split: str = value("Folder in root.", example="val")
    size: int | None = number("As dataset.size; null: images keep their size, for transforms.", min=1, example=224)
    classes: int | None = number("As dataset.classes.", min=1, example=2)


@describes("lockstep.data.images.image_folder")
@dataclass
class CachedImagesReader(ImageFolderReader):
    cache: str = choice("auto", "on", "off", help="As dataset.cache.")
    cache_dir: str = value("As dataset.cache_dir.", example="data/decoded")


@describes("lockstep.data.images.decode_images")
@dataclass
class DecodeImages:
    root: str = value("As dataset.root.", example="data")
    test_split: str = value("As dataset.test_split.", example="val")
    train_size: int | None = number("As dataset.train.size.", min=1, example=224)
    test_size: int | None = number("As dataset.test.size.", min=1, example=224)
    classes: int | None = number("As dataset.classes.", min=1, example=2)
    cache: str = choice("auto", "on", "off", help="As dataset.cache.")
    cache_dir: str = value("As dataset.cache_dir.", example="data/decoded")
    limit: float = number("As dataset.cache_limit.", above=0, example=16)
    on_error: str = choice("fail", "skip", help="As dataset.on_error.")


@describes("lockstep.data.builtin.random_pairs")
@dataclass
class RandomPairsReader(Half):
    samples: int = number("As dataset.samples.", min=1, example=2048)
    features: int = number("As dataset.features.", min=1, example=20)
    seed: int = number("As seed.", min=0, max=LARGEST_SEED, example=0)


@describes("lockstep.data.text.held_out_text")
@dataclass
class TextReader:
    path: str = value("As dataset.path.", example="my.txt")
    symbols: str = choice("characters", "bytes", help="As dataset.symbols.")
    block: int = number("As dataset.block.", min=1, example=64)


@describes("lockstep.data.text.training_text")
@dataclass
class TrainingTextReader(TextReader):
    samples: int | None = number("As dataset.samples.", min=1, example=6000)


@describes("lockstep.data.text.check_text")
@dataclass
class TextCheck(TextReader):
    classes: int = number("As dataset.classes.", min=1, example=65)


@describes("lockstep.data.builtin.download")
@dataclass
class Download:
    data_dir: str = value("Folder of the data sets.", example="data")
    name: str = value("Name of the data set in torchvision.", example="MNIST")


@describes("lockstep.data.transforms.MixUp")
@describes("lockstep.data.transforms.CutMix")
@dataclass
class Mixing:
    alpha: float = number("The share of an image is drawn from Beta(alpha, alpha).", above=0, example=0.2)
    classes: int | None = number("As dataset.classes.", min=1, example=10)


@describes("lockstep.data.transforms.RandomErasing")
@dataclass
class RandomErasing:
    p: float = number("Probability that a rectangle is erased.", min=0, max=1, example=0.25)
    scale: list[float] = number(
        "Least and largest area, as a share of the image.", min=0, max=1, length=2, example=[0.02, 0.33]
    )
    ratio: list[float] = number("Least and largest height over width.", above=0, length=2, example=[0.3, 3.3])


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


describes("lockstep.modes.train.Train", "mode/train")(NoKeys)
describes("lockstep.modes.check.Check", "mode/check")(NoKeys)


@dataclass
class Trained:
    """A mode that uses the weights of a run."""

    snapshot: str = value("The weights to use: last, best, or a snapshot's file.", example="best")


@describes("lockstep.modes.evaluate.Evaluate", "mode/evaluate")
@dataclass
class Evaluate(Trained):
    split: str = choice("test", "train", help="The data to evaluate; training data is not augmented.")
    file: str | None = value("Where the numbers go; null: evaluation.json in the run folder.", example="numbers.json")


@describes("lockstep.modes.predict.Predict", "mode/predict")
@dataclass
class Predict(Trained):
    split: str = choice("test", "train", help="The data to predict; training data is not augmented.")
    file: str | None = value("Where the rows go; null: predictions.csv in the run folder.", example="rows.csv")


@describes("lockstep.modes.export.Export", "mode/export")
@dataclass
class Export(Trained):
    format: str = choice("torch_export", "onnx", "safetensors", "state_dict", help="What the file is.")
    file: str | None = value("Where the net goes; null: last.pt2, best.onnx, ... in the run.", example="net.onnx")


@describes("lockstep.modes.sample.Sample", "mode/sample")
@dataclass
class Sample(Trained):
    prompt: str = value("The text goes on from here.", example="ROMEO:")
    length: int = number("Tokens to write.", min=1, example=500)
    temperature: float = number(
        "Below 1 likely tokens are drawn more often; 0: always the likeliest.", min=0, example=0.8
    )
    top_k: int | None = number("Draw from the k likeliest tokens only.", min=1, example=40)
    seed: int = number("Seed of what is drawn.", min=0, max=LARGEST_SEED, example=0)
