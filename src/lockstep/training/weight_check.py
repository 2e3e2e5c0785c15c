"""Compares the weights of all ranks now and then: a flipped bit on one rank is found and named."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import RanksDiffer, first_of
from lockstep.training.buffers import IN_A_BUFFER
from lockstep.training.state import TrainState
from lockstep.training.watchers import Watcher

PIECE = 2**16  # words that are multiplied by the same weights
ROWS = 64  # pieces at once on a GPU: 32 MB of products
NAMED = 3  # parameters that a message names


class WeightCheck(Watcher):
    """Called after every step on every rank. Every `every` steps the ranks compare a digest of their weights.

    Only if these differ, they exchange a digest of each parameter.

    action: stop raises RanksDiffer; off compares nothing. Where ranks hold parts, the copies of each part are compared.
    Strategies whose ranks all differ by design have nothing to compare, see `Strategy.replicated_tensors`.
    """

    def __init__(self, state: TrainState, every: int, action: str) -> None:
        self.state, self.every = state, every
        self.world = state.strategy.world
        self.enabled = action != "off" and self.world.size > 1 and bool(state.strategy.replicated_tensors())
        self.last_step = 0

    def on_epoch_start(self) -> None:
        self.last_step = self.state.progress.step

    def after_step(self, samples: int) -> None:
        """Raises as `check_now` does."""
        step = self.state.progress.step
        is_due = step // self.every > self.last_step // self.every
        self.last_step = step
        if is_due:
            self.check_now()

    def check_now(self) -> None:
        """Compare the weights as they are now. A collective.

        Raises RanksDiffer, on all ranks, if they differ.
        """
        if not self.enabled:
            return
        tensors = self.state.strategy.replicated_tensors()
        digests = torch.stack([digest(local_part(tensor)).to(self.world.device) for tensor in tensors.values()])
        mine = int(digest(digests))
        totals = self.world.all_gather_json(mine)
        apart = self.state.strategy.ranks_per_model
        alike = [range(first, self.world.size, apart) for first in range(apart)]  # ranks that should hold the same
        differing = [ranks for ranks in alike if len({totals[rank] for rank in ranks}) > 1]
        if not differing:
            return
        chosen = [choose_reference(totals, ranks) for ranks in differing]
        parts = self.world.all_gather_json(digests.tolist())
        found = [
            describe(list(tensors), parts, ranks, reference)
            for ranks, (reference, _) in zip(differing, chosen, strict=True)
        ]
        what = f"the weights differ between ranks at step {self.state.progress.step}: {'; '.join(found)}"
        of_ranks = dict(zip(tensors, zip(*parts, strict=True), strict=True)) if apart == 1 else {}
        untrained = [name for name, weight in self.state.strategy.model.named_parameters() if not weight.requires_grad]
        changed = [name for name in untrained if len(set(of_ranks.get(name, ()))) > 1]
        if changed:
            what += f"; perhaps the forward pass changes {first_of(changed)}, which is not trained: {IN_A_BUFFER}"
        if not all(is_majority for _, is_majority in chosen):
            what += ", and no majority shows which are right"
        raise RanksDiffer(what)


def digest(tensor: Tensor) -> Tensor:
    """A 0-d int64 tensor on the same device, in which every bit of `tensor` counts.

    It is the sum of all values, read as 64-bit words, times odd weights that depend on the position, modulo 2**64. A
    change of one bit changes a word by a power of two, and an odd multiple of that is never 0 modulo 2**64.
    """
    words = _words(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
    length = words.numel()
    if length <= PIECE:
        return _product(words, odd_weights(words.device, length))
    whole = length // PIECE * PIECE
    rest = _product(words[whole:], odd_weights(words.device, length - whole))
    sums = _row_products(words[:whole].view(-1, PIECE), odd_weights(words.device, PIECE))
    return digest(torch.cat([sums, rest.view(1)]))


def _words(values: Tensor) -> Tensor:
    """(n,) int64: the bytes of `values` in their logical order, with zeros up to whole words. Mostly without a copy."""
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.reshape(-1)
    size = flat.element_size()
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64)
    words = torch.zeros(-(-flat.numel() * size // 8), dtype=torch.int64, device=flat.device)
    words.view(flat.dtype)[: flat.numel()] = flat
    return words


def _product(words: Tensor, weights: Tensor) -> Tensor:
    """0-d. On a CPU dot and mv take a third of the time of a product and its sum; for GPUs torch has none."""
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


def _row_products(rows: Tensor, weights: Tensor) -> Tensor:
    """Of each row, (n,)."""
    if rows.device.type == "cpu":
        return torch.mv(rows, weights)
    return torch.cat([(some * weights).sum(1) for some in rows.split(ROWS)])


_weights: dict[tuple[torch.device, int], Tensor] = {}


def odd_weights(device: torch.device, length: int) -> Tensor:
    """The first `length` of PIECE odd int64 numbers, the same on every rank and in every run."""
    found = _weights.get((device, length))
    if found is None:
        found = _weights.get((device, PIECE))
        if found is None:
            generator = torch.Generator().manual_seed(0)
            found = (torch.randint(-(2**63), 2**63 - 1, (PIECE,), generator=generator) | 1).to(device)
            _weights[device, PIECE] = found
        _weights[device, length] = found = found[:length]
    return found


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is. Without the import of DTensor, which takes long."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def choose_reference(totals: Sequence[int], ranks: Sequence[int]) -> tuple[int, bool]:
    """The first of `ranks` that holds what most of them hold, and whether these are more than half of them.

    totals: the digest of every rank.
    """
    value, count = Counter(totals[rank] for rank in ranks).most_common(1)[0]
    return next(rank for rank in ranks if totals[rank] == value), 2 * count > len(ranks)


def describe(names: Sequence[str], parts: Sequence[Sequence[int]], ranks: Sequence[int], reference: int) -> str:
    """What differs, and on which of `ranks`. parts: for every rank the digest of each of `names`."""
    sentences = []
    for rank in ranks:
        other = [
            name for name, ours, theirs in zip(names, parts[rank], parts[reference], strict=True) if ours != theirs
        ]
        if other:
            sentences.append(f"rank {rank} has other values in {first_of(other, NAMED)}")
    return f"{'; '.join(sentences)} than rank {reference}"
