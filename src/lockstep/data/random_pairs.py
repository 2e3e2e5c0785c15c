"""Uniform random pairs for regression, as in the DDP tutorial series."""

import torch

from lockstep.data.in_memory import InMemoryDataset


def random_pairs(samples: int, features: int, seed: int, train: bool) -> InMemoryDataset:
    """Inputs (samples, features) and targets (samples, 1), uniform in 0..1."""
    generator = torch.Generator().manual_seed(2 * seed + (not train))
    inputs = torch.rand(samples, features, generator=generator)
    return InMemoryDataset(inputs, torch.rand(samples, 1, generator=generator))
