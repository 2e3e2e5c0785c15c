"""mode=find_lr: a learning rate for a run, from a short training in which it rises (Smith 2017)."""

import logging
import math
import shlex
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import get_object

from lockstep.config.nodes import instantiate
from lockstep.config.schema import Count, Node, Positive, RunConfig
from lockstep.errors import ConfigError, TrainingDiverged
from lockstep.failures import reporter
from lockstep.files import write_whole
from lockstep.modes.base import Mode, begin, join
from lockstep.text import show

if TYPE_CHECKING:
    from PIL import ImageDraw

    from lockstep.config.record import ConfigRecord
    from lockstep.preflight import Parts
    from lockstep.strategies.base import JobSpec

log = logging.getLogger(__name__)

PICTURE = "find_lr.png"
LEAST_STEPS = 40
FINER = 3  # pixels drawn for one of the picture, so that dots and letters are smooth
# In pixels as drawn: the picture and its margins, from the margins to the outermost dots, a dot, and letters.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT, INSET, RADIUS, LETTERS = (
    FINER * n for n in (420, 300, 70, 46, 30, 20, 12, 4, 12)
)
INK, GRID, DOT, PALE, BEST = "#222222", "#dddddd", "#3b75af", "#b3cbe2", "#d1495b"
RISING = "lockstep.training.lr_range.rising"


class FindLr(Mode):
    """Trains with a rate that rises exponentially, until the loss diverges, and suggests one.

    Model, data, batches and optimizer are the run's own. All rates of an optimizer rise by the same factor. Nothing is
    evaluated, and no snapshot is written.

    min_lr: optimizer.lr of the first step.
    max_lr: optimizer.lr of the last step.
    steps: training steps from the first to the last.
    """

    name, needs_run = "find_lr", False

    def __init__(self, min_lr: Positive, max_lr: Positive, steps: Count) -> None:
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps

    def validate(self, job: "JobSpec") -> None:
        if self.min_lr >= self.max_lr:
            raise ConfigError(
                f"mode.max_lr={show(self.max_lr)} must be above mode.min_lr={show(self.min_lr)}; type "
                f"mode.max_lr={show(1000 * self.min_lr)}"
            )
        if self.steps < LEAST_STEPS:
            raise ConfigError(f"mode.steps={self.steps} are too few for a curve; type mode.steps={LEAST_STEPS} or more")

    def work(self, config: RunConfig, record: "ConfigRecord", parts: "Parts") -> float:
        """Returns the suggestion. Raises ConfigError, on all ranks, if the loss never falls."""
        from lockstep import build
        from lockstep.distributed.run_folder import hold_run_folder
        from lockstep.training.lr_range import RateFinder, suggested

        with join(config, parts) as (world, logs), hold_run_folder(config.run_dir, world):
            begin(config, record, world, logs)
            typed = config.optimizer.get("lr")
            if not typed:
                raise ConfigError("mode=find_lr scales the rates from optimizer.lr; type optimizer.lr=0.1")
            changes: dict[str, Any] = {"trainer.max_steps": self.steps, "trainer.epochs": self.steps}
            changes |= {"trainer.max_time": None, "trainer.pause_after": None, "trainer.ema": None, "watch.nan": "stop"}
            rising = {"first": self.min_lr / typed, "last": self.max_lr / typed}
            changes["scheduler"] = {"_target_": RISING} | rising
            run = build.build_run(config.changed(changes), world, parts)
            if run.step.unit > 1:
                raise ConfigError("mode=find_lr needs steps that all ranks take together; type strategy=ddp")
            config, finder = run.config, RateFinder()
            run.strategy.module.train()
            reporter.epoch_starts(1)
            for batch in run.loaders.train.batches(run.progress):
                if run.progress.samples == 0:
                    run.meter.clear()
                    run.step.draws.begin_epoch()
                run.step(batch)
                run.progress.advance(batch)
                finder.on_step_end(run)
                if run.finished:
                    break
                run.end_epoch()
            losses = finder.losses
            ratio = self.max_lr / self.min_lr
            rates = [self.min_lr * ratio ** (step / (self.steps - 1)) for step in range(len(losses))]
            found = suggested(rates, losses)
            if world.is_rank_zero:
                write_curves(config, rates, losses, found)
            if found is None and not math.isfinite(losses[-1]):
                raise TrainingDiverged(f"the loss is {losses[-1]} at step {len(losses)}", "type mode.min_lr=<smaller>")
            if found is None:
                raise ConfigError(
                    f"the loss does not fall by more than batches differ from optimizer.lr={rates[0]:.2g} to "
                    f"{rates[-1]:.2g}, see {Path(config.run_dir) / PICTURE}; type mode=check to see whether the model "
                    f"learns at all, or mode.max_lr={show(100 * self.max_lr)} mode.steps={2 * self.steps}"
                )
            log.info("picture: %s", Path(config.run_dir) / PICTURE)
            log.info("type %s", words_of(config, found / typed))
            return found


def words_of(config: RunConfig, factor: float) -> str:
    """What to type for rates that are `factor` times those of the config."""

    def scaled(node: Node) -> Node:
        return {
            key: float(f"{value * factor:.2g}") if key == "lr" or key.endswith("_lr") else value
            for key, value in node.items()
        }

    optimizer, groups = config.optimizer, config.parameters.groups
    words = [f"optimizer.{key}={show(value)}" for key, value in scaled(optimizer).items() if value != optimizer[key]]
    if any("lr" in group for group in groups):
        words.append(f"parameters.groups={show([scaled(group) for group in groups])}")
    return shlex.join(words)


def write_curves(config: RunConfig, rates: Sequence[float], losses: Sequence[float], found: float | None) -> None:
    """The picture in the run folder, and the curves for TensorBoard if that is a logger."""
    try:
        draw(Path(config.run_dir) / PICTURE, rates, losses, found)
        for node in config.logger.values():
            if get_object(node["_target_"]).__name__ == "TensorBoardLogger":
                logger = instantiate(node)
                for step, (rate, loss) in enumerate(zip(rates, losses, strict=True), start=1):
                    logger.log({"find_lr/loss": loss, "find_lr/lr": rate}, step)
    except OSError as error:
        log.warning("the curve cannot be written (%s); free some space in %s", error, config.run_dir)


def draw(path: Path, rates: Sequence[float], losses: Sequence[float], found: float | None) -> None:
    """Losses over rates on a logarithmic axis: dots, their average as a line, and the rate `found` as a red dot.

    A loss far above the first ones is drawn at the upper edge. Raises OSError if it cannot be written.
    """
    from PIL import Image, ImageDraw, ImageFont

    from lockstep.training.lr_range import START, smoothed

    curve, begin = smoothed(losses), max(losses[:START])
    low, high = (
        min(losses),
        min(max(losses), 2 * begin - min(curve)),
    )  # as far above the first losses as the curve falls
    first, last = math.log10(rates[0]), math.log10(rates[-1])

    def pixel(rate: float, loss: float) -> tuple[float, float]:
        height = (min(loss, high) - low) / (high - low or 1.0)
        return pixel_of((math.log10(rate) - first) / (last - first), height)

    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    canvas = ImageDraw.Draw(image)
    canvas.font = ImageFont.load_default(LETTERS)
    decades = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
    labels = {f"{10.0**power:g}": (power - first) / (last - first) for power in decades}
    title = "loss by optimizer.lr" + ("" if found is None else f"; red: {found:.2g}, the suggestion")
    draw_axes(canvas, title, labels, low, high)
    radius = RADIUS / 2
    for x, y in map(pixel, rates, losses):
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=PALE)
    canvas.line(list(map(pixel, rates, curve)), fill=DOT, width=FINER)
    if found is not None:
        (x, y), radius = pixel(found, curve[bisect_right(rates, found) - 1]), RADIUS
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=BEST)
    write_whole(path, lambda file: image.reduce(FINER).save(file, format="png"), sync=False)


def draw_axes(canvas: "ImageDraw.ImageDraw", title: str, places: Mapping[str, float], low: float, high: float) -> None:
    """The axes with their labels: the loss upwards, from `low` to `high`, and the rates at their places from 0 to 1."""
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    canvas.text((LEFT, TOP - INSET), title, fill=INK, anchor="ld")
    for share in (0.0, 0.5, 1.0):
        _, height = pixel_of(0.0, share)
        canvas.line((LEFT, height, right, height), fill=GRID, width=FINER)
        value = low + share * (high - low)
        canvas.text((LEFT - INSET, height), f"{value:.4g}", fill=INK, anchor="rm")
    canvas.line((LEFT, floor, right, floor), fill=INK, width=FINER)
    taken = float("-inf")
    for label, place in places.items():
        half = canvas.textlength(label) / 2
        across = min(pixel_of(place, 0.0)[0], WIDTH - half)
        if across - half > taken:  # else it would lie over the label before it
            canvas.text((across, floor + INSET / 2), label, fill=INK, anchor="ma")
            taken = across + half + INSET / 2


def pixel_of(place: float, height: float) -> tuple[float, float]:
    """The pixel of a point inside the axes. Its coordinates are from 0 to 1."""
    wide, tall = WIDTH - LEFT - RIGHT - 2 * INSET, HEIGHT - BOTTOM - TOP - 2 * INSET
    return LEFT + INSET + place * wide, TOP + INSET + (1 - height) * tall
