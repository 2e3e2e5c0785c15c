"""An evaluation: each sample counts once, and it leaves no trace in the model."""

import csv
import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.data.loader import Loader, files_of
from lockstep.data.partition import fold_in, seeded
from lockstep.data.reader import EVALUATION
from lockstep.data.source import class_names, count_samples
from lockstep.distributed import signals
from lockstep.distributed.world import World
from lockstep.errors import EXIT_STOPPED_WITHOUT_SNAPSHOT, RanksDiffer, StoppedEarly, TrainingDiverged, first_of
from lockstep.failures.record import heartbeat
from lockstep.files import write_whole
from lockstep.loggers.base import Loggers
from lockstep.strategies.base import broadcast
from lockstep.tasks.base import Samples, Task, as_float64
from lockstep.training.metrics import Meter
from lockstep.training.nonfinite import SMALLER_STEPS
from lockstep.training.run import Run

log = logging.getLogger(__name__)

MEASURED = {"loss": "loss", "accuracy": "right"}  # {of a task: column of its samples}
COLUMNS = (*MEASURED.values(), "target", "prediction")  # NaN where a sample has no such value
ASKED_EVERY = 8  # parts, after which the ranks ask whether one of them was told to stop; of the first ones each
Means = dict[str, float]
Look = Callable[..., None]
"""(outputs, targets, numbers of the samples in the data set); for `evaluate` before them what the task gave."""


def stop() -> NoReturn:
    """A rank was asked to stop, and there is nothing to save."""
    raise StoppedEarly("stopped early; the numbers are dropped, type the command again", EXIT_STOPPED_WITHOUT_SNAPSHOT)


def evaluate(run: Run, loader: Loader, on_stop: Callable[[], NoReturn] = stop, look: "Look | None" = None) -> Means:
    """{metric: mean over every sample of the data set, each counted once}, with the averaged weights if there are any,
    on every rank. A collective. After a rank was asked to stop, `on_stop` is called on every rank. look: sees all."""
    meter = Meter(run.task, run.world)

    def count(outputs: Any, targets: Any, numbers: Tensor) -> None:
        found = run.task(outputs, targets)
        sums = run.task.sums(outputs, targets, not loader.is_whole, found)
        meter.add(0, sums.values, sums.counts)
        if look is not None:
            look(found, outputs, targets, numbers)

    pass_each(run, loader, count, on_stop)
    return meter.means(run.world.all_reduce_sum(meter.flush()).tolist())


def pass_each(run: Run, loader: Loader, look: Look, on_stop: Callable[[], NoReturn] = stop) -> None:
    """As `evaluate`, without a task: pass each sample forward. Of ranks that compute the same outputs, one looks."""
    strategy, stops = run.strategy, False
    numbers = torch.empty(0)  # of the samples that are still to be counted; a pipeline counts some at a time

    def take(outputs: Any, targets: Any) -> None:
        nonlocal numbers
        now, numbers = numbers.tensor_split([count_samples(targets)])
        if strategy.counts:
            look(outputs, targets, now)

    with evaluating(run, loader):
        for number, part in enumerate(loader.evaluation(run.config.evaluation.batch_size), start=1):
            numbers = part.numbers
            strategy.evaluate(part, take)
            heartbeat.beat()
            if number < ASKED_EVERY or number % ASKED_EVERY == 0:
                (stops,) = run.world.any_of([signals.stop_requested()])
            if stops:
                break
    if stops:  # the model has its own weights again, which may be saved
        on_stop()


@contextmanager
def evaluating(run: Run, loader: Loader) -> Iterator[None]:
    """The model evaluates with the averaged weights. Afterwards its buffers, on all ranks those of rank 0, and
    all random states are as before."""
    heartbeat.enter("evaluation")
    strategy, modules = run.strategy, [*run.model.modules()]
    # Not inference_mode: buffers that FSDP creates inside it could not be used for training afterwards.
    with run.averaged_weights(), torch.no_grad(), seeded(fold_in(loader.seed, EVALUATION, loader.share[0])):
        if strategy.data_share_of(run.world.size) > 1:  # running statistics of ranks with samples of their own differ
            buffers = dict(run.model.named_buffers())
            sizes = run.world.all_gather_json([tensor.numel() for tensor in buffers.values()])
            if odd := [name for name, *of_ranks in zip(buffers, *sizes, strict=False) if len({*of_ranks}) > 1]:
                what = f"the buffer {first_of(odd)} has other sizes on other ranks: it grows with a rank's samples"
                raise RanksDiffer(f"{what}; give it a fixed size, or type launch=env")
            broadcast([*buffers.values()])
        # Some modules change buffers, or the weights of an embedding with max_norm, in an evaluation, too.
        owned = [(module, name) for module in modules for name, _ in module.named_buffers(recurse=False)]
        embeddings = (module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag))
        owned += [(each, "weight") for each in embeddings if each.max_norm is not None]
        before = [(tensor, tensor.clone()) for tensor in (getattr(*place) for place in owned)]
        strategy.module.eval()
        try:
            yield
        finally:
            strategy.module.train()
            for place, (tensor, copy) in zip(owned, before, strict=True):
                if getattr(*place) is tensor and tensor.shape == copy.shape:
                    tensor.copy_(copy)
                else:
                    setattr(*place, copy)


def gathered(world: World, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows that all ranks have of the samples, on rank 0 in the order of their "number"; empty elsewhere. A
    collective. parts: {name: rows (n, ...)} of this rank."""
    mine = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]} if parts else {}
    shares = [share for share in world.gather_tensors(mine) if share]  # of a pipeline, one rank has the outputs
    joined = {name: torch.cat([share[name] for share in shares]) for name in shares[0]} if shares else {}
    return {name: rows[joined["number"].argsort()] for name, rows in joined.items()}


class Metrics:
    """Metrics of torchmetrics over an evaluation, in float64. Those that keep samples, as AUROC does, get all in their
    order, on rank 0. Of the others each rank has its share, and torchmetrics brings their states together."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = metrics
        for metric in metrics.values():
            metric.reset()
        keep = {name for name, one in metrics.items() if any(isinstance(s, list) for s in one.metric_state.values())}
        self.by_sample, self.by_rank = sorted(keep), sorted(metrics.keys() - keep)

    def add(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns what `compute` is to have of these samples, beside their numbers."""
        for name in self.by_rank if len(targets) else ():
            self.metrics[name].update(scores.double(), targets)
        return {"scores": scores.double(), "targets": targets} if self.by_sample else {}

    def compute(self, world: World, whole: Mapping[str, Tensor]) -> Means:
        """The same on every rank. A collective. whole: as `gathered` gives it."""
        found = {name: float(self.metrics[name].compute()) for name in self.by_rank}
        for name in self.by_sample if whole else ():
            metric = self.metrics[name]
            metric.distributed_available_fn = lambda: False  # else it waits for the other ranks
            metric.update(whole["scores"].to(metric.device), whole["targets"].to(metric.device))
            found[name] = float(metric.compute())
        return world.broadcast_json(found) if self.by_sample else found


def results_of(
    task: Task, found: Mapping[str, Tensor], outputs: Any, targets: Any, numbers: Tensor, draws: bool
) -> dict[str, Tensor]:
    """The columns of these samples, as `Samples`. found: what the task gave. draws: whether predictions, too."""
    nothing = torch.full((len(numbers),), math.nan, dtype=torch.float64)
    row = dict.fromkeys(COLUMNS, nothing) | {"number": numbers, "target": _one_value(targets, nothing)}
    if draws and row["target"] is not nothing:
        row["prediction"] = _one_value(task.predictions(outputs).get("prediction"), nothing)
    for metric in MEASURED.keys() & found.keys():
        values = as_float64(found[metric])
        if values.dim() > 1:  # of targets: the mean over those of a sample that count
            counted = torch.ones_like(values) if task.ignored is None else as_float64(targets != task.ignored)
            values = (values * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)
        row[MEASURED[metric]] = values
    return row


def _one_value(values: Any, nothing: Tensor) -> Tensor:
    """(N,) float64: of each sample its value; `nothing` if it has several."""
    is_one = isinstance(values, Tensor) and values.dim() > 0 and values.shape[1:].numel() == 1
    return as_float64(values).flatten() if is_one else nothing


def standard_errors(columns: Samples) -> dict[str, float]:
    """{metric: of its mean}, but of an accuracy that is 0 or 1, whose number tells it."""
    found = dict[str, float]()
    for metric, name in MEASURED.items() if columns else ():
        column = columns[name]
        is_binary = metric == "accuracy" and bool(((column == 0) | (column == 1)).all())
        if len(column) > 1 and not is_binary and not column.isnan().any():
            found[metric] = float(column.std() / len(column) ** 0.5)
    return found


def write_samples(file: Path, loader: Loader, columns: Samples) -> None:
    """The columns number, file, target, loss and right that there are. A full disk costs them, and a warning."""
    files, classes, text = files_of(loader), class_names(loader.reader.dataset), io.StringIO()
    there = [name for name in ("number", "target", "loss", "right") if not columns[name].isnan().all()]
    known: dict[str, list[Any]] = {name: columns[name].tolist() for name in there}
    for name in {"target", "right"} & known.keys():
        known[name] = [int(value) if value.is_integer() else value for value in known[name]]
    known["target"] = [classes[one] if one in range(len(classes)) else one for one in known.get("target", ())]
    known["file"] = [files[number] for number in known["number"]] if files else []
    table = {name: known[name] for name in ("number", "file", "target", "loss", "right") if known.get(name)}
    csv.writer(text, lineterminator="\n").writerows([[*table], *zip(*table.values(), strict=True)])
    try:
        write_whole(file, text.getvalue(), sync=False)
    except OSError as error:
        log.warning("%s cannot be written (%s); the run goes on", file, error)


@dataclass
class Evaluator:
    """Evaluates `run` on the split `name`, "val" or "test", with images of so many samples for `loggers`. Rank 0 writes
    the results of each sample into `file`, and has {"samples", "errors"} of the last evaluation in `facts`."""

    run: Run
    loader: Loader
    loggers: Loggers
    images: int
    name: str
    metrics: Mapping[str, Any]
    file: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __call__(self, on_stop: Callable[[], NoReturn], step: int | None = None) -> Means:
        """As `evaluate`, of the weights of `step`; None: the present one. Raises TrainingDiverged for a NaN."""
        run, loader, task = self.run, self.loader, self.run.task
        step = run.progress.step if step is None else step
        draws, metrics, rows = self.images > 0 and task.draws, Metrics(self.metrics), list[dict[str, Tensor]]()
        keeps = draws or self.file is not None

        def look(found: Mapping[str, Tensor], outputs: Any, targets: Any, numbers: Tensor) -> None:
            rows.append({"number": numbers})
            if keeps:
                rows[-1] |= results_of(task, found, outputs, targets, numbers, draws)
            if self.metrics:
                rows[-1] |= metrics.add(task.scores(outputs), targets)

        means = evaluate(run, loader, on_stop, look)
        columns = gathered(run.world, rows) if keeps or metrics.by_sample else {}
        means |= metrics.compute(run.world, columns)
        if not math.isfinite(means["loss"]):
            what = f"the {self.name} loss is {means['loss']} at step {step}, from weights, data or a batch of one"
            sizes = "evaluation.batch_size=<other>, which in mode=check is mode.changed.evaluation.batch_size"
            advice = f"{SMALLER_STEPS}, repair the data, evaluate mode.snapshot=<another one>, or type {sizes}"
            raise TrainingDiverged(what, advice)
        for callback in run.callbacks:
            callback.on_evaluation(run, self.name, means)
        if keeps:
            self.facts = {"samples": len(loader.reader), "errors": standard_errors(columns)}
            if self.file is not None and run.world.is_rank_zero:
                write_samples(self.file, loader, columns)
            if draws:
                self.loggers.draw(self.name, partial(self._figures, columns), step)
        return means

    def _figures(self, samples: Samples) -> dict[str, Tensor]:
        loader = self.loader
        found = self.run.task.figures(samples, loader.shown, class_names(loader.reader.dataset), self.images)
        return {f"{self.name}/{name}": image for name, image in found.items()}
