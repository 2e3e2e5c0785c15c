"""Sums on the device, one reduction, means at the end."""

import torch

TOGETHER = 64  # steps' sums are added up at once: one by one, a sum of two numbers costs far more in calling than in adding


class Meter:
    """Adds up named sums and a sample count in float64 on the device; a mean over all ranks costs one all-reduce.

    Counts stay exact up to 2**53 samples, so an accuracy is the integer count of one process divided once.
    """

    def __init__(self, names, world):
        self.names, self.world = list(names), world
        self.sums = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=world.device)
        self.told = torch.zeros_like(self.sums)
        self.new, self.count = [], 0  # not yet in the sums

    def clear(self):
        self.new, self.count = [], 0
        self.sums.zero_()
        self.told.zero_()

    def add(self, sums, count):
        """sums: {name: 0-d tensor summed over this rank's `count` samples}. Never waits for the device."""
        self.new.append([sums[name].detach() for name in self.names])
        self.count += count
        if len(self.new) == TOGETHER:
            self._add_up()

    def _add_up(self):
        if self.new:
            columns = [torch.stack(column).sum(dtype=torch.float64) for column in zip(*self.new, strict=True)]
            self.sums += torch.stack([*columns, self.sums.new_full((), self.count)])
            self.new, self.count = [], 0

    def totals(self):
        """The sums over all ranks and, last, the number of samples, as a tensor; this rank's own sums stay as they are."""
        self._add_up()
        return self.world.total(self.sums.clone())

    def means(self):
        """{name: mean over every sample of every rank}."""
        return self._means(self.totals())

    def means_since_last(self):
        """The means over what was added since this was last asked, over all ranks."""
        now = self.totals()
        recent, self.told = now - self.told, now
        return self._means(recent)

    def _means(self, totals):
        *sums, count = totals.tolist()
        return {name: value / max(count, 1) for name, value in zip(self.names, sums, strict=True)}

    def restore(self, totals):
        """Go on from `totals` of an earlier life, perhaps of another world size: the leader carries them all."""
        self.clear()
        self.told = totals.to(self.sums.device)
        self.sums = self.told.clone() if self.world.leads else torch.zeros_like(self.told)
