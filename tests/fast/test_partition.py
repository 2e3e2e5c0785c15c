"""Micro-batches, shares and batch sizes."""

import pytest
import torch

from lockstep.data.partition import fold_in, generator, global_batch_size, micro_batch_parts
from lockstep.errors import ConfigError


@pytest.mark.parametrize("samples", [0, 1, 5, 16, 61])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_are_a_partition_with_sizes_that_differ_by_one_at_most(samples: int, steps: int, size: int) -> None:
    batch = torch.arange(samples)
    of_ranks = [micro_batch_parts(batch, steps, rank, size) for rank in range(size)]
    steps = max(1, min(steps, samples))  # no micro-batch without samples
    in_order = [parts[number] for number in range(steps) for parts in of_ranks]
    assert torch.cat([part.indices for part in in_order]).tolist() == list(range(samples))
    assert [part.number for part in in_order] == list(range(steps * size))
    for number in range(steps):
        lengths = [len(parts[number].indices) for parts in of_ranks]
        assert max(lengths) - min(lengths) <= 1


def test_a_seed_depends_on_every_number_and_on_their_order() -> None:
    seeds = {fold_in(*numbers) for numbers in [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 1)]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert generator(3, 4).initial_seed() == fold_in(3, 4)


def test_the_batch_size_per_rank_is_multiplied_by_the_ranks() -> None:
    assert global_batch_size(4, 64, None, 1) == 64
    assert global_batch_size(4, 64, 10, 1) == 40
    assert global_batch_size(3, 12, None, 4) == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((8, 7, None, 1), "trainer.batch_size=7 is too small for 8 ranks; type trainer.batch_size=8 or more"),
        ((1, 3, None, 4), "too small for 4 micro-batches; type trainer.batch_size=4 or more"),
        ((2, 64, 3, 4), "too small for 2 ranks and 4 micro-batches each; type trainer.batch_size"),
    ],
)
def test_a_batch_in_which_a_rank_gets_no_sample_is_refused(arguments: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        global_batch_size(*arguments)
