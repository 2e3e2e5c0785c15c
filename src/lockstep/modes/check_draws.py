"""What mode=check finds out about random numbers: what is drawn outside the seeds, and by each rank for itself."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lockstep.data.dataset import tensors_in
from lockstep.data.loader import BatchLoader
from lockstep.data.partition import LoadedPart
from lockstep.data.samples import Samples
from lockstep.errors import ConfigError
from lockstep.training.loop import batches, set_seed
from lockstep.training.setup import autocast
from lockstep.training.state import TrainState
from lockstep.training.weight_check import digest

SAMPLES_READ = 8  # twice


@dataclass
class Draws:
    """What is drawn outside the seeds, and what is drawn by each rank for itself.

    samples, outputs: whether they are other ones the second time, from the same seeds. by_rank: whether outputs depend
    on the seed. dropouts: names of modules that make them do so. The outputs are those of the model and of the loss.
    """

    samples: bool = False
    outputs: bool = False
    by_rank: bool = False
    dropouts: list[str] = field(default_factory=list)


def what_is_drawn(state: TrainState, loader: BatchLoader) -> Draws:
    """Read some samples twice, and compute the first batch three times. For a world of one rank."""
    model = state.strategy.model.train()
    dropouts = [name for name, part in model.named_modules() if isinstance(part, _DropoutNd) and part.p > 0]
    part = next(batches(state, loader, slice(0, 1))).parts[0]
    saved = model.state_dict().keys()  # what a snapshot keeps: other state has to be found
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name in saved}
    outputs = []
    for seed in (0, 0, 1):
        outputs.append(_outputs(state, part, seed))
        _restore(model, buffers)
    first, again, other = outputs
    same_samples = loader.reader is None or _same(*_read_twice(loader.samples, loader.is_stream))
    return Draws(not same_samples, not _same(first, again), not _same(first, other), dropouts)


def _outputs(state: TrainState, part: LoadedPart, seed: int) -> list[Tensor]:
    """What the model and the loss compute of a part of a batch."""
    set_seed(seed)
    with torch.no_grad(), autocast(state.strategy.world.device, state.settings.precision):
        outputs = state.strategy.module(part.inputs)
        return [tensor.clone() for tensor in tensors_in((outputs, state.task(outputs, part.targets)))]


@torch.no_grad()
def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """A model may have put new tensors in the place of its buffers, so they are found by their names."""
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


def first_samples(loader: BatchLoader) -> list[int]:
    """The digests of the tensors in the first samples of an epoch; empty for data in memory, and for a stream."""
    if loader.reader is None or loader.is_stream:
        return []
    return [int(digest(tensor)) for tensor in _read(loader.samples, turn=1)]


def _read_twice(samples: Samples, is_stream: bool) -> list[list[Tensor]]:
    """The tensors of the first samples of an epoch, read in order and then backwards; a stream in order."""
    return [_read(samples, turn=1), _read(samples, turn=1 if is_stream else -1)]


def _read(samples: Samples, turn: int) -> list[Tensor]:
    """The tensors of the first samples, in their order. turn: 1, or -1 to read them backwards."""
    numbers = list(range(min(SAMPLES_READ, len(samples))))
    read = samples.read([(0, number) for number in numbers[::turn]])
    collated = samples.collate(read._replace(numbers=read.numbers[::turn], samples=read.samples[::turn]))
    if isinstance(collated, ConfigError):
        raise collated
    return list(tensors_in(collated))


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit by bit, but that a NaN is like a NaN."""
    return all(torch.equal(first.nan_to_num(), second.nan_to_num()) for first, second in zip(one, other, strict=True))
