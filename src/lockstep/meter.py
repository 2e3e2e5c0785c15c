"""Sums on the device, one reduction, means at the end."""

import torch


class Meter:
    """Adds up named sums and a sample count in float64 on the device; a mean over all ranks costs one all-reduce.

    Counts stay exact up to 2**53 samples, so an accuracy is the integer count of one process divided once.
    """

    def __init__(self, names, world):
        self.names, self.world, self.count = list(names), world, 0
        self.sums = [torch.zeros((), dtype=torch.float64, device=world.device) for _ in self.names]
        self.told = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=world.device)

    def clear(self):
        self.count = 0
        for total in self.sums:
            total.zero_()
        self.told.zero_()

    @torch.no_grad()
    def add(self, sums, count):
        """sums: {name: 0-d tensor summed over this rank's `count` samples}. Never waits for the device."""
        for name, total in zip(self.names, self.sums, strict=True):
            total += sums[name]
        self.count += count

    def totals(self):
        """The sums over all ranks and, last, the number of samples, as a tensor; this rank's own sums stay as they are."""
        return self.world.total(torch.stack([*self.sums, self.told.new_tensor(self.count)]))

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
        self.told = totals.to(self.told.device)
        *self.sums, count = (self.told.clone() if self.world.leads else torch.zeros_like(self.told)).unbind()
        self.count = int(count)
