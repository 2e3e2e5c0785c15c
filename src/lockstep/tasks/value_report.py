"""What an evaluation of a regression shows: predicted against true values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.distributed.world import World
from lockstep.tasks.base import ReadSample, Report, Share

MOST_POINTS = 1000


class ValueReport(Report):
    """Keeps the first value of every n-th test sample, so that there are at most MOST_POINTS.

    points: (points, 2), predicted and true. They are the same samples at any number of ranks.
    """

    def __init__(self, share: Share) -> None:
        self.share, self.seen = share, 0
        self.every = max(1, -(-share.samples // MOST_POINTS))
        self.points = torch.zeros(-(-share.samples // self.every), 2, dtype=torch.float64)

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        self.points = self.points.to(outputs.device)
        first = self.share.rank + self.share.size * self.seen
        numbers = range(first, first + self.share.size * len(targets), self.share.size)
        rows = [row for row, number in enumerate(numbers) if number % self.every == 0]
        slots = [numbers[row] // self.every for row in rows]
        values = torch.stack([_first_values(outputs[rows]), _first_values(targets[rows])], dim=1)
        self.points[slots] = values.double()
        self.seen += len(targets)

    def reduce(self, world: World) -> None:
        self.points = world.all_reduce_sum(self.points.to(world.device)).cpu()

    def figures(self, sample: ReadSample, classes: Sequence[str]) -> dict[str, Tensor]:
        from lockstep.tasks.drawing import draw_points

        points = [(predicted, true) for predicted, true in self.points[self.points.isfinite().all(1)].tolist()]
        return {"test/predicted_against_true": draw_points(points)} if points else {}


def _first_values(values: Tensor) -> Tensor:
    """(N, ...) -> (N,)."""
    return values.flatten(1)[:, 0] if values.dim() > 1 else values
