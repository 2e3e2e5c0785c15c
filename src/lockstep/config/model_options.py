"""The options of the groups model, strategy and gradient_sync: the keys of their YAML. As `options.py`."""

from dataclasses import dataclass
from typing import Any

from lockstep.config.fields import choice, number, value
from lockstep.config.options import describes

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


@describes("lockstep.strategies.async_parameter_server.AsyncParameterServer", "strategy/async_parameter_server")
@dataclass
class AsyncParameterServer:
    sync_every: int = number("Optimizer steps after which all ranks synchronise.", min=1, example=100)


@describes("lockstep.strategies.gradient_sync.local_sgd.LocalSGD", "gradient_sync/local_sgd")
@dataclass
class LocalSGD:
    sync_every: int = number("Steps between two averages of the weights.", min=1, example=8)


@describes("lockstep.strategies.gradient_sync.powersgd.PowerSGD", "gradient_sync/powersgd")
@dataclass
class PowerSGD:
    rank: int = number("Rank of the matrices that approximate the gradients.", min=1, example=2)
    start_step: int = number("Steps of plain all-reduce at first.", min=2, example=10)
    min_compression: float = number("A matrix that shrinks by less is sent whole.", above=0, example=2)
    epsilon: float = number("Added to the norms when matrices are orthogonalised.", min=0, example=1e-8)
