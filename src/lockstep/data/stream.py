"""An IterableDataset, read as if its items had numbers."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.data.partition import fold_in
from lockstep.data.random_numbers import seed_all
from lockstep.errors import ConfigError

ITEMS = 2  # folded into seeds, so that no transform draws the same numbers


class Stream:
    """Item n of `dataset` by its number n, of numbers that rise. A smaller number starts it again.

    Every rank reads all items and keeps its own, so a run is the same at any number of ranks. Torch, numpy and random
    are seeded before each item. What this needs: `__len__`, the items of an epoch; the same items in the same order on
    every rank and each time; and `set_epoch(epoch)`, if there is one, for another order. Items are not shuffled here.
    """

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.items: Iterator[Any] = iter(())
        self.epoch, self.position = 0, -1  # of the last item that was read

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked by require_stream

    def read(self, epoch: int, number: int) -> Any:
        """Raises ConfigError if there are fewer items."""
        if epoch != self.epoch or number <= self.position or self.position < 0:
            self._start(epoch)
        item = None
        while self.position < number:
            seed_all(fold_in(self.seed, epoch, self.position + 1, ITEMS))
            try:
                item = next(self.items)
            except StopIteration:
                raise ConfigError(
                    f"{type(self.dataset).__name__} has {self.position + 1} items, and its __len__ says {len(self)}; "
                    f"type return {self.position + 1} there, or let it give the rest"
                ) from None
            self.position += 1
        return item

    def _start(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(max(epoch, 0))  # an evaluation has -1, which is no seed
        seed_all(fold_in(self.seed, epoch, ITEMS))
        self.items, self.epoch, self.position = iter(self.dataset), epoch, -1


def require_stream(dataset: object, name: str, workers: int, mixes: bool, on_error: str) -> None:
    """Raise ConfigError for an IterableDataset that cannot be read by numbers that rise. Others are no concern here."""
    if not isinstance(dataset, IterableDataset):
        return
    kind = f"the {name} is an IterableDataset, {type(dataset).__name__}"
    if not hasattr(dataset, "__len__"):
        raise ConfigError(f"{kind}, without __len__; add one that returns the number of items of an epoch")
    if workers:
        raise ConfigError(f"{kind}, which each rank reads in its own process; type dataset.workers=0")
    if mixes:
        raise ConfigError(f"{kind}, of which no earlier item can be mixed in; type dataset.batch_transforms=[]")
    if on_error == "skip":
        raise ConfigError(f"{kind}, which ends with its first error; type dataset.on_error=fail")
