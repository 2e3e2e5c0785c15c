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
from lockstep.distributed.backend import float64_device
from lockstep.distributed.world import World
from lockstep.errors import EXIT_STOPPED_WITHOUT_SNAPSHOT, StoppedEarly, TrainingDiverged
from lockstep.failures.record import heartbeat
from lockstep.files import write_whole
from lockstep.loggers.base import Loggers
from lockstep.tasks.base import Samples, Task, as_float64
from lockstep.training.metrics import Meter
from lockstep.training.nonfinite import SMALLER_STEPS
from lockstep.training.run import Run

log = logging.getLogger(__name__)

COLUMNS = ("seen", "loss", "right", "target", "prediction")  # of a sample in SampleResults; NaN: it has none
ASKED_EVERY = 8  # parts, after which the ranks ask whether one of them was told to stop; of the first ones each


def stop() -> NoReturn:
    """A rank was asked to stop, and there is nothing to save."""
    raise StoppedEarly("stopped early; the numbers are dropped, type the command again", EXIT_STOPPED_WITHOUT_SNAPSHOT)


def evaluate(
    run: Run,
    loader: Loader,
    on_stop: Callable[[], NoReturn] = stop,
    results: "SampleResults | None" = None,
    metrics: "Metrics | None" = None,
) -> dict[str, float]:
    """{metric: mean over every sample of the data set, each counted once}, with the averaged weights if there are any.

    A collective: every rank calls it and gets the same numbers. After a rank was asked to stop, the evaluation ends,
    its numbers are dropped, and `on_stop` is called on every rank.

    results: gets all outputs of this rank. metrics: of torchmetrics.
    """
    meter, strategy, ignores = Meter(run.task, run.world), run.strategy, not loader.is_whole
    numbers = torch.empty(0)  # of the samples that are still to be counted; a pipeline counts some at a time

    def count(outputs: Any, targets: Any) -> None:
        nonlocal numbers
        now, numbers = numbers.tensor_split([count_samples(targets)])
        if not strategy.counts:
            return
        found = run.task(outputs, targets)
        sums = run.task.sums(outputs, targets, ignores, found)
        meter.add(0, sums.values, sums.counts)
        if results is not None:
            results.add(found, outputs, targets, now)
        if metrics is not None:
            metrics.add(run.task.scores(outputs), targets, now)

    with evaluating(run, loader):
        for number, part in enumerate(loader.evaluation(run.config.evaluation.batch_size), start=1):
            numbers = part.numbers
            strategy.evaluate(part, count)
            heartbeat.beat()
            if (number < ASKED_EVERY or number % ASKED_EVERY == 0) and run.world.any_of([signals.stop_requested()])[0]:
                on_stop()
    means = meter.means(run.world.all_reduce_sum(meter.flush()))
    return means | ({} if metrics is None else metrics.compute(run))


@contextmanager
def evaluating(run: Run, loader: Loader) -> Iterator[None]:
    """Inside the block the model holds the averaged weights, and evaluates without gradients. After it, its buffers and
    all random states are what they were."""
    heartbeat.enter("evaluation")
    strategy = run.strategy
    # Not inference_mode: buffers that FSDP creates inside it could not be used for training afterwards.
    with run.averaged_weights(), torch.no_grad(), seeded(fold_in(loader.seed, EVALUATION, loader.share[0])):
        strategy.sync_buffers()
        with buffers_kept(strategy.model):
            strategy.module.eval()
            try:
                yield
            finally:
                strategy.module.train()


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """After the block the buffers, and the weights of an embedding with max_norm, are what they were before it: some
    modules change them in an evaluation, too, and the training would go on with what the test data has left."""
    owned = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    owned += [(module, "weight") for module in embeddings if module.max_norm is not None]
    before = [(getattr(module, name), getattr(module, name).clone()) for module, name in owned]
    yield
    for (module, name), (tensor, copy) in zip(owned, before, strict=True):
        if getattr(module, name) is tensor and tensor.shape == copy.shape:
            tensor.copy_(copy)
        else:
            setattr(module, name, copy)


class Metrics:
    """Metrics of torchmetrics over an evaluation, in float64.

    One that keeps samples, as AUROC does, gets those of all ranks, in the order of the data set. Of the others each
    rank has its share, and their states are brought together by their own rules.
    """

    def __init__(self, metrics: Mapping[str, Any], samples: int) -> None:
        self.metrics, self.samples = metrics, samples
        self.kept = list[tuple[Tensor, Tensor, Tensor]]()  # (scores, targets, numbers)
        self.by_sample = set[str]()
        for name, metric in metrics.items():
            metric.reset()
            if any(isinstance(state, list) for state in metric.metric_state.values()):
                self.by_sample.add(name)

    def add(self, scores: Tensor, targets: Tensor, numbers: Tensor) -> None:
        """numbers: (N,) of the samples in the data set."""
        for name in self.metrics.keys() - self.by_sample if len(targets) else ():
            self.metrics[name].update(scores.double(), targets)
        if self.by_sample:
            self.kept.append((scores.double(), targets, numbers))

    def compute(self, run: Run) -> dict[str, float]:
        """{name: value}, the same on every rank. A collective."""
        whole = self._whole(run) if self.by_sample else ()
        for name, metric in self.metrics.items():
            metric.sync_on_compute = name not in self.by_sample
            if name in self.by_sample:
                metric.update(*whole)
        return {name: float(metric.compute()) for name, metric in self.metrics.items()}

    def _whole(self, run: Run) -> list[Tensor]:
        """The scores and targets of all samples, on every rank, in the order of the data set."""
        columns = [torch.cat(column) for column in zip(*self.kept, strict=True)]
        mine = [[list(column.shape[1:]), str(column.dtype).removeprefix("torch.")] for column in columns]
        forms = next(filter(None, run.world.all_gather_json(mine)))  # of a pipeline, one rank has the outputs
        columns = columns or [torch.empty(0, *shape, dtype=getattr(torch, dtype)) for shape, dtype in forms]
        *rows, numbers = columns
        return [by_sample(run.world, self.samples, numbers, each).to(each.dtype) for each in rows]


def by_sample(world: World, samples: int, numbers: Tensor, rows: Tensor) -> Tensor:
    """(samples, ...) float64: the rows that the ranks have of each sample, 0 where none has any. A collective.

    numbers: (N,) of the samples of this rank's rows.
    """
    device = float64_device(world.device)
    whole = torch.zeros(samples, *rows.shape[1:], dtype=torch.float64, device=device)
    whole[numbers.to(device)] = rows.to(device, torch.float64)
    return world.all_reduce_sum(whole)


class SampleResults:
    """What an evaluation says of each sample.

    samples: of the split. draws: whether predictions, too.
    Attributes after `reduce`: columns, as `Samples`. samples: how many were evaluated. errors: {metric: standard error
    of its mean over the samples}, but of an accuracy that is 0 or 1, whose number tells it.
    """

    def __init__(self, task: Task, samples: int, draws: bool = False) -> None:
        self.task, self.length, self.draws = task, samples, draws
        self.samples, self.errors = 0, dict[str, float]()
        self.kept = list[tuple[Tensor, Tensor]]()  # (numbers, rows of `COLUMNS`)
        self.columns: dict[str, Tensor] = {}

    def add(self, found: Mapping[str, Tensor], outputs: Any, targets: Any, numbers: Tensor) -> None:
        """found: what the task gave for these samples of this rank."""
        self.samples += count_samples(targets)
        loss = self._each(found["loss"], targets)
        row = {"seen": torch.ones_like(loss), "loss": loss, "target": _one_value(targets)}
        if self.task.ignored is not None and isinstance(targets, Tensor) and targets.dim() == 1:
            row["seen"] = as_float64(targets != self.task.ignored)
        if "accuracy" in found:
            row["right"] = self._each(found["accuracy"], targets)
        if self.draws and row["target"] is not None:
            row["prediction"] = _one_value(self.task.predictions(outputs).get("prediction"))
        known = {name: column for name, column in row.items() if column is not None}
        nothing = torch.full_like(loss, math.nan)
        self.kept.append((numbers, torch.stack([known.get(name, nothing) for name in COLUMNS], 1)))

    def _each(self, value: Tensor, targets: Any) -> Tensor:
        """(N,) float64: of values of targets the mean over those of a sample that count."""
        if value.dim() <= 1:
            return as_float64(value)
        counted = as_float64(torch.ones_like(targets) if self.task.ignored is None else targets != self.task.ignored)
        return (as_float64(value) * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)

    def reduce(self, world: World) -> None:
        self.samples = sum(world.all_gather_json(self.samples))
        self.kept.append((torch.empty(0, dtype=torch.int64), torch.empty(0, len(COLUMNS))))  # a rank may have none
        mine, rows = ([each.cpu() for each in column] for column in zip(*self.kept, strict=True))
        whole = by_sample(world, self.length, torch.cat(mine), torch.cat(rows)).cpu()
        numbers = whole[:, 0].nonzero().flatten()
        self.columns = {"number": numbers} | dict(zip(COLUMNS, whole[numbers].unbind(1), strict=True))
        for metric, name in (("loss", "loss"), ("accuracy", "right")):
            column = self.columns[name]
            is_binary = metric == "accuracy" and bool(((column == 0) | (column == 1)).all())
            if len(column) > 1 and not is_binary and not column.isnan().any():
                self.errors[metric] = float(column.std() / len(column) ** 0.5)

    def table(self, loader: Loader) -> dict[str, Sequence[Any]]:
        """{column: a value for each sample} of number, file, target, loss and right: those that there are."""
        files, classes = files_of(loader), class_names(loader.reader.dataset)
        known: dict[str, list[Any]] = {name: column.tolist() for name, column in self.columns.items()}
        for name in ("target", "right"):
            known[name] = [int(value) if value.is_integer() else value for value in known[name]]
        known["target"] = [classes[one] if one in range(len(classes)) else one for one in known["target"]]
        known["file"] = [files[number] for number in known["number"]] if files else []
        given = [name for name in ("target", "right") if not self.columns[name].isnan().all()]
        wanted = ("number", *["file"] * bool(files), "target", "loss", "right")
        return {name: known[name] for name in wanted if name in ("number", "file", "loss", *given)}


def _one_value(values: Any) -> Tensor | None:
    """(N,) float64: of each sample its value; None if it has several."""
    is_one = isinstance(values, Tensor) and values.dim() > 0 and values.shape[1:].numel() == 1
    return as_float64(values).flatten() if is_one else None


@dataclass
class Evaluator:
    """Evaluates `run` on the split `name`, "val" or "test". Images for `loggers` show `images` samples; 0: there are
    none. file: where rank 0 writes the results of each sample; None: nowhere.

    facts: {"samples", "errors"} of the last evaluation, as in `SampleResults`, where there is a file.
    """

    run: Run
    loader: Loader
    loggers: Loggers
    images: int
    name: str
    metrics: Mapping[str, Any]
    file: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __call__(self, on_stop: Callable[[], NoReturn], step: int | None = None) -> dict[str, float]:
        """As `evaluate`, of the weights of `step`, and the loggers get images; None: the present step. A collective.

        Raises TrainingDiverged if the loss is NaN or infinite.
        """
        run, loader = self.run, self.loader
        step = run.progress.step if step is None else step
        draws = self.images > 0 and run.task.draws
        results = SampleResults(run.task, len(loader.reader), draws) if draws or self.file is not None else None
        metrics = Metrics(self.metrics, len(loader.reader)) if self.metrics else None
        means = evaluate(run, loader, on_stop, results, metrics)
        if not math.isfinite(means["loss"]):
            raise TrainingDiverged(f"the {self.name} loss is {means['loss']} at step {step}", SMALLER_STEPS)
        for callback in run.callbacks:
            callback.on_evaluation(run, self.name, means)
        if results is None:
            return means
        results.reduce(run.world)
        self.facts = {"samples": results.samples, "errors": results.errors}
        if self.file is not None and run.world.is_rank_zero:
            write_samples(self.file, results, loader)
        if draws:
            self.loggers.draw(self.name, partial(self._figures, results.columns), step)
        return means

    def _figures(self, samples: Samples) -> dict[str, Tensor]:
        classes = class_names(self.loader.reader.dataset)
        found = self.run.task.figures(samples, self.loader.shown, classes, self.images)
        return {f"{self.name}/{name}": image for name, image in found.items()}


def write_samples(file: Path, results: SampleResults, loader: Loader) -> None:
    """A full disk costs the file, and a warning."""
    table, text = results.table(loader), io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[*table], *zip(*table.values(), strict=True)])
    try:
        write_whole(file, text.getvalue(), sync=False)
    except OSError as error:
        log.warning("%s cannot be written (%s); the run goes on", file, error)
