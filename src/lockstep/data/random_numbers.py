"""The random numbers that a sample's transforms draw, whichever process draws them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed what transforms draw from: torch's generator of the CPU, numpy's global one, and Python's `random`."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """After the block these generators go on as if nothing had been drawn in it."""
    torch_state, numpy_state, state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(state)
