"""Which samples hold NaN or infinite values. A run that such a sample breaks needs other data, not a smaller step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.nested import tensors_in
from lockstep.errors import first_of

SAMPLES_NAMED = 16  # in a sentence

Broken = tuple[int, str, str]
"""The number of a sample, "NaN" or "infinite values", and "inputs" or "targets"."""


def broken_samples(indices: Tensor, inputs: Any, targets: Any) -> list[Broken]:
    """Those of a batch. indices: the numbers of its samples (N,). Reads values: on a GPU the host waits.

    A tensor with other rows than samples, such as sequences that a collate_fn packs, names none.
    """
    found: list[Broken] = []
    for place, value in (("inputs", inputs), ("targets", targets)):
        for tensor in filter(torch.is_floating_point, tensors_in(value)):
            if tensor.shape[:1] != indices.shape:
                continue
            rows = tensor.reshape(len(tensor), -1) if len(tensor) else tensor[:, None]
            for kind, is_broken in (("NaN", rows.isnan().any(1)), ("infinite values", rows.isinf().any(1))):
                found += [(number, kind, place) for number in indices.to(tensor.device)[is_broken].tolist()]
    return found


def sentence_about(broken: Iterable[Sequence[Any]]) -> str:
    """ "sample 17 has NaN in its inputs". broken: one at least; a `Broken` that came as JSON is a list."""
    groups: dict[tuple[str, str], set[int]] = {}
    for number, kind, place in broken:
        groups.setdefault((kind, place), set()).add(number)
    words = []
    for (kind, place), numbers in groups.items():
        names = first_of(sorted(numbers), SAMPLES_NAMED)
        words.append(
            f"sample {names} has {kind} in its {place}"
            if len(numbers) == 1
            else f"the samples {names} have {kind} in their {place}"
        )
    return " and ".join(words)
