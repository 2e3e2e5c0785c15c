"""The plot of a sweep, `sweep.png`: one panel for each parameter, its values across and the objective upwards.

Drawn with Pillow, which torchvision brings along, when the sweep ends.
"""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.sweeps.table import FINISHED, Row

if TYPE_CHECKING:
    from PIL import ImageDraw

PLOT = "sweep.png"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 420, 300, 70, 52, 30, 20  # of a panel, and of its margins
PANELS_IN_A_ROW = 3
LONGEST_LABEL = 14  # characters
INK, GRID, DOT, PALE, BEST = "#222222", "#dddddd", "#3b75af", "#b3cbe2", "#d1495b"


@dataclass(frozen=True)
class Axis:
    """A parameter. places: {value as typed: its place from 0 to 1}. Numbers are spread by their logarithm if apart."""

    key: str
    places: dict[str, float]


def plot_sweep(folder: Path, rows: Sequence[Row], objective: str, best: int) -> bool:
    """Write the plot of all jobs with an objective into the sweep's folder. best: the number of the best job.

    Jobs that are not trained to the end, such as those that a search has pruned, are pale, at their last objective.
    Returns False where there is nothing to plot: no parameter with two values, or fewer than two such jobs.
    Raises OSError if it cannot be written.
    """
    from PIL import Image, ImageDraw

    points = [(row, values_of(row)) for row in rows if row.objective is not None]
    axes = axes_of([values for _, values in points])
    if not axes or len(points) < 2:
        return False
    columns = min(PANELS_IN_A_ROW, len(axes))
    lines = -(-len(axes) // columns)
    image = Image.new("RGB", (WIDTH * columns, HEIGHT * lines), "white")
    canvas = ImageDraw.Draw(image)
    heights = scale([row.objective or 0.0 for row, _ in points])
    for index, axis in enumerate(axes):
        panel = _Panel(canvas, WIDTH * (index % columns), HEIGHT * (index // columns))
        panel.frame(axis, objective, [row.objective or 0.0 for row, _ in points])
        for (row, values), height in sorted(
            zip(points, heights, strict=True), key=lambda point: _layer(point[0][0], best)
        ):
            if axis.key in values:
                panel.dot(axis.places[values[axis.key]], height, (PALE, DOT, BEST)[_layer(row, best)])
        if any(row.state != FINISHED for row, _ in points):
            panel.note("pale: not trained to the end")
    image.save(folder / f"{PLOT}.tmp", format="png")
    os.replace(folder / f"{PLOT}.tmp", folder / PLOT)
    return True


def _layer(row: Row, best: int) -> int:
    """Higher layers are drawn later: 0 for jobs not trained to the end, 1 for finished ones, 2 for the best."""
    return 2 if row.number == best else int(row.state == FINISHED)


def values_of(row: Row) -> dict[str, str]:
    """{key: value} of what a job changes."""
    pairs = (word.partition("=") for word in shlex.split(row.overrides))
    return {key.lstrip("+"): value for key, _, value in pairs}


def axes_of(jobs: Sequence[dict[str, str]]) -> list[Axis]:
    """One axis for each key that has two values or more."""
    keys = dict.fromkeys(key for values in jobs for key in values)
    found = [(key, list(dict.fromkeys(values[key] for values in jobs if key in values))) for key in keys]
    return [Axis(key, dict(zip(values, _places(values), strict=True))) for key, values in found if len(values) > 1]


def _places(values: Sequence[str]) -> list[float]:
    """Numbers by their size, or by their logarithm if the largest is 20 times the smallest. Words are evenly spread."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return [index / (len(values) - 1) for index in range(len(values))]
    if min(numbers) > 0 and max(numbers) / min(numbers) >= 20:
        numbers = [math.log(number) for number in numbers]
    return scale(numbers)


def scale(numbers: Sequence[float]) -> list[float]:
    """Numbers from 0 to 1. What is not finite is at 0."""
    finite = [number for number in numbers if abs(number) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    span = high - low or 1.0
    return [(number - low) / span if abs(number) < float("inf") else 0.0 for number in numbers]


class _Panel:
    """One panel of the picture, whose upper left corner is at (x, y)."""

    def __init__(self, canvas: "ImageDraw.ImageDraw", x: int, y: int) -> None:
        self.canvas, self.x, self.y = canvas, x, y
        self.right, self.floor = x + WIDTH - RIGHT, y + HEIGHT - BOTTOM

    def frame(self, axis: Axis, objective: str, heights: Sequence[float]) -> None:
        """The axes with their labels."""
        self.canvas.text((self.x + LEFT, self.y + 8), f"{objective} by {axis.key}", fill=INK)
        for share in (0.0, 0.5, 1.0):
            _, height = self._at(0.0, share)
            self.canvas.line((self.x + LEFT, height, self.right, height), fill=GRID)
            value = min(heights) + share * (max(heights) - min(heights))
            self.canvas.text((self.x + 6, height - 6), f"{value:.4g}", fill=INK)
        self.canvas.line((self.x + LEFT, self.floor, self.right, self.floor), fill=INK)
        for number, (label, place) in enumerate(axis.places.items()):
            across, _ = self._at(place, 0.0)
            drop = 6 + 14 * (number % 2)  # neighbours' labels do not overlap
            self.canvas.text((across, self.floor + drop), label[:LONGEST_LABEL], fill=INK, anchor="ma")

    def note(self, text: str) -> None:
        """A line below the axes."""
        self.canvas.text((self.x + LEFT, self.floor + BOTTOM - 16), text, fill=INK)

    def dot(self, place: float, height: float, colour: str) -> None:
        across, up = self._at(place, height)
        self.canvas.ellipse((across - 4, up - 4, across + 4, up + 4), fill=colour)

    def _at(self, place: float, height: float) -> tuple[float, float]:
        """The pixel of a point whose coordinates are from 0 to 1."""
        inner, tall = self.right - self.x - LEFT - 40, self.floor - self.y - TOP - 10
        return self.x + LEFT + 20 + place * inner, self.floor - 5 - height * tall
