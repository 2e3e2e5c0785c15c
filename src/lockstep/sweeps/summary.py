"""What a sweep shows at its end: the table sorted by objective, causes of failures, a plot, and what to type next."""

import math
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import EXIT_FINISHED, EXIT_JOBS_FAILED, EXIT_RESUMABLE, ConfigError
from lockstep.files import write_whole
from lockstep.runs.record import read_run
from lockstep.sweeps.table import FAILED, FINISHED, PRUNED, REFUSED, STATES, SUBMITTED, TABLE, Row, SweepTable
from lockstep.text import aligned

if TYPE_CHECKING:
    from PIL import ImageDraw

SHOWN = 40  # rows on the console
CAUSE = 100  # characters of a cause on the console
PLOT = "sweep.png"
FINER = 3  # pixels drawn for one of the picture, so that dots and letters are smooth
# In pixels as drawn: a panel and its margins, from the margins to the outermost dots, a dot, and letters.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT, INSET, RADIUS, LETTERS = (
    FINER * n for n in (420, 300, 70, 46, 30, 20, 12, 4, 12)
)
BESIDE, MOST_SHIFTED = 2 * RADIUS + FINER, 8 * RADIUS  # of dots that would hide each other
PANELS_IN_A_ROW = 3
INK, GRID, DOT, PALE, BEST = "#222222", "#dddddd", "#3b75af", "#b3cbe2", "#d1495b"


def say(text: str, end: str = "\n") -> None:
    """Print text. After the first write that fails, as with `| head -1`, this process and its jobs print nothing."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def sorted_rows(table: SweepTable, mode: str) -> list[Row]:
    """The finished rows first, best first, and the failed ones last. mode: "min" or "max"."""
    sign = -1 if mode == "max" else 1

    def place(row: Row) -> tuple[int, float, int]:
        value = row.best if row.objective is None else row.objective
        is_known = value is not None and not math.isnan(value)
        return STATES.index(row.state), sign * value if is_known and value is not None else math.inf, row.number

    return sorted(table, key=place)


def print_summary(table: SweepTable, objective: str, mode: str, command: Sequence[str], resume: Sequence[str]) -> None:
    """Print the table, which job is the best, and what to type.

    objective, mode: of jobs whose run.json does not tell.
    command: the words of one run without what the sweep varies.
    resume: those that go on with this sweep.
    """
    objectives: dict[int, tuple[str, str]] = {}  # {job: (name, "min" or "max")}: a job may have chosen another metric
    for row in table:
        with suppress(ConfigError):
            if row.objective is not None:
                chosen = read_run(table.folder / row.folder)["objective"]
                objectives[row.number] = chosen["name"], chosen["mode"]
    names = sorted({name for name, _ in objectives.values()})
    if len(names) == 1:
        objective, mode = next(iter(objectives.values()))
    rows = sorted_rows(table, mode) if len(names) <= 1 else sorted(table, key=lambda row: row.number)
    counts = [f"{count} {state}" for state in STATES if (count := sum(row.state == state for row in rows))]
    say(f"\nsweep: {', '.join(counts)}; {TABLE} in {table.folder.absolute()}")
    cells = [("job", "state", objective if len(names) <= 1 else "objective", "best", "at step", "seconds", "overrides")]
    for row in rows[:SHOWN]:
        value = _number(row.objective)
        if len(names) > 1 and row.number in objectives:
            value = f"{objectives[row.number][0]} {value}"
        cause = f"   {textwrap.shorten(row.cause, CAUSE, placeholder=' ...')}" if row.cause else ""
        best_step = "" if row.best_step is None else str(row.best_step)
        overrides = f"{row.overrides}{cause}"
        cells.append((str(row.number), row.state, value, _number(row.best), best_step, f"{row.seconds:.1f}", overrides))
    for line in aligned(cells):
        say(f"  {line}")
    if len(rows) > SHOWN:
        say(f"... and {len(rows) - SHOWN} more in {TABLE}")
    best = rows[0] if rows and rows[0].state == FINISHED else None
    if len(names) > 1:
        say(f"best:       none, as the objectives are different metrics: {', '.join(names)}")
    elif best is not None:
        say(f"best:       job {best.number}, {table.folder / best.folder}")
        try:
            if plot_sweep(table.folder, rows, objective, best.number):
                say(f"plot:       {table.folder / PLOT}")
        except OSError as error:
            reason, again = error.strerror, shlex.join(table.resume)
            say(f"plot:       {PLOT} cannot be written ({reason}); to draw it, type -m {again}")
        say(f"run it again: {shlex.join(command)} {best.overrides}".rstrip())
    if any(row.state not in (FINISHED, PRUNED, FAILED) for row in rows):
        say(f"go on with: {shlex.join(resume)}")
    if any(row.state == FAILED and not row.cause.startswith(REFUSED) for row in rows):
        say(f"run what failed again: {shlex.join([*resume, 'sweep.retry=failed'])}")
    say(f"curves:     {shlex.join(['tensorboard', '--logdir', str(table.folder.absolute())])}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def print_share(table: SweepTable, epochs: int) -> None:
    """After a search by halving: the share of all training that it took. epochs: of a whole job."""
    trained = [max(row.results, default=0) for row in table]
    if any(trained):
        share = sum(trained) / (epochs * len(trained))
        say(f"trained:    {sum(trained)} epochs, {share:.2f} of the {epochs * len(trained)} of all jobs")


def exit_code(rows: Sequence[Row], stop_code: int | None) -> int:
    """The exit code of the whole sweep: 0 only if every job has finished, or was submitted and is not waited for.

    stop_code: of jobs that a signal stopped.
    """
    if stop_code is not None:
        return stop_code
    states = {row.state for row in rows if row.cause != SUBMITTED}
    if FAILED in states:
        return EXIT_JOBS_FAILED
    return EXIT_FINISHED if states <= {FINISHED, PRUNED} else EXIT_RESUMABLE


def plot_sweep(folder: Path, rows: Sequence[Row], objective: str, best: int) -> bool:
    """Write the plot of all jobs with an objective into the sweep's folder. best: the number of the best job.

    Jobs that are not trained to the end, such as those that a search has pruned, are pale, at their last objective.
    Returns False where there is nothing to plot: no parameter with two values, or fewer than two such jobs.
    Raises OSError if it cannot be written.
    """
    from PIL import Image, ImageDraw, ImageFont

    points = [(row, row.values) for row in rows if row.objective is not None]
    keys = dict.fromkeys(key for _, values in points for key in values)
    typed = {key: list(dict.fromkeys(values[key] for _, values in points if key in values)) for key in keys}
    # One panel for each parameter with two values or more: {value as typed: its place from 0 to 1}.
    panels = {key: dict(zip(words, _places(words), strict=True)) for key, words in typed.items() if len(words) > 1}
    if not panels or len(points) < 2:
        return False
    columns = min(PANELS_IN_A_ROW, len(panels))
    lines = -(-len(panels) // columns)
    image = Image.new("RGB", (WIDTH * columns, HEIGHT * lines), "white")
    canvas = ImageDraw.Draw(image)
    canvas.font = ImageFont.load_default(LETTERS)
    objectives = [row.objective or 0.0 for row, _ in points]
    drawn = sorted(zip(points, scale(objectives), strict=True), key=lambda point: _layer(point[0][0], best))
    for index, (key, places) in enumerate(panels.items()):
        left, top = WIDTH * (index % columns) + LEFT, HEIGHT * (index // columns) + TOP
        _frame(canvas, left, top, f"{objective} by {key.lstrip('+')}", places, objectives)
        taken: list[tuple[float, float]] = []
        for (row, values), height in drawn:
            if key in values:
                across, up = _free_place(*_place(left, top, places[values[key]], height), taken)
                box = (across - RADIUS, up - RADIUS, across + RADIUS, up + RADIUS)
                canvas.ellipse(box, fill=(PALE, DOT, BEST)[_layer(row, best)])
        legend = f"red: job {best}, the best"
        if any(row.state != FINISHED for row, _ in points):
            legend += "; pale: not trained to the end"
        canvas.text((left, top - TOP + HEIGHT - 6), legend, fill=INK, anchor="ld")
    write_whole(folder / PLOT, lambda file: image.reduce(FINER).save(file, format="png"), sync=False)
    return True


def _layer(row: Row, best: int) -> int:
    """Higher layers are drawn later: 0 for jobs not trained to the end, 1 for finished ones, 2 for the best."""
    return 2 if row.number == best else int(row.state == FINISHED)


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


def _place(left: int, top: int, place: float, height: float) -> tuple[float, float]:
    """The pixel of a point in the panel whose axes begin at `left` and `top`. Its coordinates are from 0 to 1."""
    wide, tall = WIDTH - LEFT - RIGHT - 2 * INSET, HEIGHT - BOTTOM - TOP - 2 * INSET
    return left + INSET + place * wide, top + INSET + (1 - height) * tall


def _free_place(across: float, up: float, taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Beside the dots that would hide this one: jobs may have the same result. The place is added to `taken`."""
    shift = 0
    while abs(shift) < MOST_SHIFTED and any(abs(across + shift - x) + abs(up - y) < RADIUS for x, y in taken):
        shift = -shift if shift > 0 else BESIDE - shift
    taken.append((across + shift, up))
    return taken[-1]


def _frame(
    canvas: "ImageDraw.ImageDraw",
    left: int,
    top: int,
    title: str,
    places: Mapping[str, float],
    objectives: Sequence[float],
) -> None:
    """The axes of a panel with their labels: the objective upwards, and the values of a parameter at their places."""
    right, floor = left + WIDTH - LEFT - RIGHT, top + HEIGHT - BOTTOM - TOP
    finite = [value for value in objectives if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)  # as in `scale`
    canvas.text((left, top - INSET), title, fill=INK, anchor="ld")
    for share in (0.0, 0.5, 1.0):
        _, height = _place(left, top, 0.0, share)
        canvas.line((left, height, right, height), fill=GRID, width=FINER)
        value = low + share * (high - low)
        canvas.text((left - INSET, height), f"{value:.4g}", fill=INK, anchor="rm")
    canvas.line((left, floor, right, floor), fill=INK, width=FINER)
    room, taken = (right - left) / len(places), float("-inf")
    for label, place in sorted(places.items(), key=lambda item: item[1]):
        while canvas.textlength(label) > room and len(label) > 4:
            label = f"{label[:-2]}…"
        half = canvas.textlength(label) / 2
        across = min(_place(left, top, place, 0.0)[0], right + RIGHT - half)
        if across - half > taken:  # else it would lie over the label before it
            canvas.text((across, floor + INSET / 2), label, fill=INK, anchor="ma")
            taken = across + half + INSET / 2
