"""Loaders without a run: of any rank of any number of ranks, in this process."""

from dataclasses import dataclass
from functools import partial

import torch

from lockstep.data.loader import InputConverter, Loader
from lockstep.data.partition import Order, parts
from lockstep.data.reader import SampleReader

BATCH, SEED = 25, 3
CPU = torch.device("cpu")


@dataclass
class Position:
    epoch: int = 0
    samples: int = 0


def loader(data, rank=0, size=1, micro=1, batch=BATCH, **options):
    """Of float64 inputs, by default images, normalised. options: of `Order` and of `Loader`."""
    order = {name: options.pop(name) for name in ("draws", "weights", "shards", "window") if name in options}
    converter = InputConverter(torch.float64, mean=options.pop("mean", [0.4] * 3), std=[0.2])
    reader, epochs = SampleReader(data, "data", SEED), Order(len(data), SEED, **order)
    plan, share = partial(parts, micro_batches=micro, rank=rank, size=size), (rank, size)
    return Loader(reader, epochs, converter, CPU, SEED, batch, lambda _, count: plan(count), share, **options)
