"""One rank's share of each global batch, delivered to its device.

The plan is global and every rank computes it alike: the epoch's permutation, cut into global batches, cut into
`accumulate` micro-batches, cut into one share per rank. A rank's number changes which share it takes and nothing else,
and a run that stopped after any number of samples goes on from there at any world size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader

from lockstep.datasets import InMemory
from lockstep.refusal import Refusal

AHEAD = 2**20  # values of samples looked up and converted at once: done step by step, the calls cost more than their work


class Batch(NamedTuple):
    """One optimizer step's work for one rank: `count` samples in the whole world, and this rank's parts of it.

    parts: [(place, inputs, targets), ...]; `place` is the part's number among all parts of the global batch.
    """

    count: int
    parts: list


def micro_batches(accumulate):
    """A cut of the global batch into `accumulate` micro-batches, and of each into one share per rank."""

    def cut(batch, world):
        micros = enumerate(batch.tensor_split(accumulate))
        return [(number * world.size + world.rank, micro.tensor_split(world.size)[world.rank]) for number, micro in micros]

    return cut


def virtual_ranks(shards):
    """A cut of the global batch into the same `shards` parts at any world size, neighbours on one rank."""

    def cut(batch, world):
        here = shards // world.size
        return list(enumerate(batch.tensor_split(shards)))[world.rank * here : (world.rank + 1) * here]

    return cut


def place_seed(*place):
    """A seed that is a function of its place (seed, epoch, step, ...) alone: no random state to save or to lose."""
    seed = 0
    for number in place:
        seed = (seed * 6364136223846793005 + 1442695040888963407 + number) % 2**63  # Knuth's MMIX constants
    return seed


def draw(*place):
    """A CPU generator at its place."""
    return torch.Generator().manual_seed(place_seed(*place))


@dataclass(frozen=True)
class Augment:
    """Random shifts by up to `pad` pixels and, with `flip`, mirror images, over a whole batch at once.

    Drawn for the global batch and cut like it, so a sample is augmented alike at any world size.
    """

    pad: int = 0
    flip: bool = False

    def __bool__(self):
        """Whether there is anything to do."""
        return bool(self.pad or self.flip)

    def plan(self, count, generator):
        """(count, 3) int64: vertical shift, horizontal shift, mirrored or not, per sample."""
        shifts = torch.randint(0, 2 * self.pad + 1, (count, 2), generator=generator)
        flips = torch.randint(0, 2, (count, 1), generator=generator) * int(self.flip)
        return torch.cat([shifts, flips], dim=1)

    def __call__(self, images, plan):
        """images: (N, C, H, W) and their plan (N, 3), both on one device. Pixels from beyond the edge are 0."""
        _, _, height, width = images.shape
        rows = plan[:, 0, None] + torch.arange(height, device=images.device)
        columns = plan[:, 1, None] + torch.arange(width, device=images.device)
        columns = torch.where(plan[:, 2, None].bool(), columns.flip(1), columns)
        padded = torch.nn.functional.pad(images, [self.pad] * 4)
        each = torch.arange(len(images), device=images.device)
        return padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Loader:
    """Feeds one rank from a data set: `epoch` for training, `once` for evaluation.

    mean, std: per channel, of images scaled to 0..1; samples that are no uint8 images go to the model as they are.
    like: a parameter of the model, whose type and memory layout the delivered batches take.
    workers: DataLoader processes for a data set that must decode its samples; one in memory needs none.
    """

    def __init__(self, dataset, world, seed, mean, std, like, augment=Augment(), workers=0):
        self.dataset, self.world, self.seed, self.augment, self.workers = dataset, world, seed, augment, workers
        self.dtype = like.dtype
        channels_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        mean, std = (torch.tensor(list(values), dtype=self.dtype, device=world.device).view(-1, 1, 1) for values in (mean, std))
        self.scale, self.shift = 1 / (255 * std), -mean / std
        self.indices = torch.device("cpu")  # where samples are looked up
        if isinstance(dataset, InMemory):
            self.indices, self.dataset = world.device, InMemory(*(tensor.to(world.device) for tensor in dataset))

    def __len__(self):
        return len(self.dataset)

    def epoch(self, epoch, batch_size, cut, skip=0, turns=slice(None)):
        """This rank's batches of one epoch, every sample of the data set once over all ranks.

        batch_size counts the whole world's samples; cut: which parts of it are this rank's (`micro_batches`,
        `virtual_ranks`); skip: the number of samples an earlier life has used; turns: which of the batches, then, where
        ranks take turns at them.
        """
        order = torch.randperm(len(self), generator=draw(self.seed, epoch)).to(self.indices)
        starts = range(skip, len(self), batch_size)[turns]
        whole = [order[start : start + batch_size] for start in starts]
        mine = [cut(batch, self.world) for batch in whole]
        drawn = (self.augment.plan(len(batch), draw(self.seed, epoch, start)) for start, batch in zip(starts, whole, strict=True))
        plans = (plan for batch in drawn for _, plan in cut(batch, self.world)) if self.augment else None
        delivered = self._deliver([share for parts in mine for _, share in parts], plans)
        for batch, parts in zip(whole, mine, strict=True):
            yield Batch(len(batch), [(place, *next(delivered)) for place, _ in parts])

    def once(self, batch_size):
        """Every sample once over all ranks, in at most `batch_size` samples a rank at a time: (inputs, targets) pairs.

        Every rank delivers equally many, if need be an empty last one: the ranks may have to compute together.
        """
        mine = torch.arange(len(self), device=self.indices)[self.world.rank :: self.world.size]
        rounds = -(-len(self) // (self.world.size * batch_size))
        yield from self._deliver([mine[turn * batch_size : (turn + 1) * batch_size] for turn in range(rounds)])

    def _deliver(self, shares, plans=None):
        """The inputs and targets of each share of indices, in order, augmented by its plan, on this rank's device."""
        for samples, targets, sizes in self._read(shares):
            samples, targets = self._send(samples), self._send(targets)
            if plans is not None:
                samples = self.augment(samples, self._send(torch.cat([next(plans) for _ in sizes])))
            yield from zip(*(tensor.split(sizes) for tensor in self._converted(samples, targets)), strict=True)

    def _read(self, shares):
        """The raw samples and targets of the shares of indices, in order: of several shares at once, and how many each has."""
        if isinstance(self.dataset, InMemory):
            several = max(1, AHEAD // max(1, max(map(len, shares), default=0) * self.dataset.samples.shape[1:].numel()))
            for first in range(0, len(shares), several):
                group = shares[first : first + several]
                indices = torch.cat(group)
                # Not samples[indices]: rows are copied whole, not value by value, five times as fast.
                samples, targets = (tensor.index_select(0, indices) for tensor in self.dataset)
                yield samples, targets, [len(share) for share in group]
        else:
            # An empty share has nothing to collate: any one sample tells the shape, and none of it is kept.
            loader = DataLoader(
                self.dataset, batch_sampler=[share.tolist() or [0] for share in shares], num_workers=self.workers,
                pin_memory=self.world.device.type == "cuda",
            )  # fmt: skip
            for share, (samples, targets) in zip(shares, loader, strict=True):
                yield samples[: len(share)], targets[: len(share)], [len(share)]

    def _send(self, tensor):
        """The tensor on this rank's device, with nobody waiting: a GPU fetches from pinned memory when it comes to it."""
        return tensor if tensor.device == self.world.device else tensor.pin_memory().to(self.world.device, non_blocking=True)

    def _converted(self, samples, targets):
        """In the type and layout that the model takes."""
        if samples.dtype == torch.uint8:
            samples = samples.to(self.dtype).mul_(self.scale).add_(self.shift)
        elif samples.is_floating_point():
            samples, targets = samples.to(self.dtype), targets.to(self.dtype)
        if samples.dim() == 4:
            samples = samples.contiguous(memory_format=self.layout)
        return samples, targets


def global_batch(world_size, batch_size, batch_size_per_rank, accumulate):
    """The number of samples an optimizer step sees over all ranks.

    Raises Refusal where a rank would have no sample in an ordinary step.
    """
    if batch_size_per_rank is not None:
        batch_size = batch_size_per_rank * world_size
    if batch_size < world_size * accumulate:
        parts = f"{world_size} ranks" + (f" and {accumulate} micro-batches each" if accumulate > 1 else "")
        raise Refusal(f"trainer.batch_size={batch_size} cannot be shared by {parts}; try trainer.batch_size={world_size * accumulate} or more")
    return batch_size
