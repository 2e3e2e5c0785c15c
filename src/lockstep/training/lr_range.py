"""The learning-rate range test (Smith 2017): the loss of each step while the rate rises, and what it suggests."""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lockstep.training.callbacks import Callback
from lockstep.training.schedules import Schedule

if TYPE_CHECKING:
    from lockstep.training.run import Run

START = 10  # steps whose losses tell where the loss begins, and how much batches differ
PART = 1 / 3
WINDOW = 5  # losses on each side of one that it is averaged with; an average of earlier losses alone would lag


def rising(optimizer: Optimizer, total_steps: int, first: float, last: float) -> Schedule:
    """All rates times a factor that rises exponentially, from `first` to `last` in the last step."""
    return Schedule(optimizer, lambda step: first * (last / first) ** (min(step, total_steps - 1) / (total_steps - 1)))


class RateFinder(Callback):
    """Keeps the loss of each step over all ranks, before its update, and ends the training when it diverges."""

    def __init__(self) -> None:
        self.losses, self.lowest, self.before = list[float](), float("inf"), list[float]()

    def on_step_end(self, run: "Run") -> None:
        totals = run.world.all_reduce_sum(run.meter.flush().clone()).tolist()
        is_first = run.progress.samples <= run.batch_size  # of an epoch, whose sums begin at zero
        before, self.before = [0.0] * len(totals) if is_first else self.before, totals
        recent = [now - then for now, then in zip(totals, before, strict=True)]
        self.losses.append(run.meter.means(recent).get("loss", float("nan")))
        begin, newest = fmean(self.losses[:START]), fmean(self.losses[-START:])
        self.lowest = min(self.lowest, newest)
        if not newest <= begin + max(abs(begin), begin - self.lowest):
            run.clock.end_at(run.progress.step)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss as the mean of those around it, of equally many on both sides."""
    sides = [min(WINDOW, step, len(losses) - 1 - step) for step in range(len(losses))]
    return [fmean(losses[step - side : step + side + 1]) for step, side in enumerate(sides)]


def suggested(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """A part of the rate with the lowest loss, None if it never falls by more than batches differ. The usual rule,
    the rate at which it falls fastest, is too low where it falls slowly: see docs/modes.md."""
    curve = smoothed(losses)
    lowest = curve.index(min(curve))
    if lowest < START or fmean(losses[:START]) - curve[lowest] <= 2 * stdev(losses[:START]):
        return None
    return max(rates[0], PART * rates[lowest])
