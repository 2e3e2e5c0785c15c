"""An evaluation: each sample counts once, and it leaves no trace in the model."""

import csv
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from lockstep.errors import EXIT_STOPPED_WITHOUT_SNAPSHOT, ConfigError, StoppedEarly, TrainingDiverged
from lockstep.failures import reporter
from lockstep.files import write_whole
from lockstep.loggers.base import Loggers
from lockstep.tasks.base import Report, Task, as_float64
from lockstep.training.metrics import Meter
from lockstep.training.nonfinite import OTHER_DATA, SMALLER_STEPS, broken_in, sentence_about
from lockstep.training.run import Run

log = logging.getLogger(__name__)

ROW = ("seen", "loss", "right", "is_right_known", "target", "is_target_known")  # of a sample in SampleResults
ASKED_EVERY = 8  # parts, after which the ranks ask whether one of them was told to stop; of the first ones each


def stop() -> NoReturn:
    """A rank was asked to stop, and there is nothing to save."""
    raise StoppedEarly("stopped early; the numbers are dropped, type the command again", EXIT_STOPPED_WITHOUT_SNAPSHOT)


def evaluate(
    run: Run,
    loader: Loader,
    on_stop: Callable[[], NoReturn] = stop,
    reports: Sequence[Report] = (),
    metrics: "Metrics | None" = None,
) -> dict[str, float]:
    """{metric: mean over every sample of the data set, each counted once}, with the averaged weights if there are any.

    A collective: every rank calls it and gets the same numbers. After a rank was asked to stop, the evaluation ends,
    its numbers are dropped, and `on_stop` is called on every rank.

    reports: get all outputs of this rank. metrics: of torchmetrics.
    """
    meter, strategy, ignores = Meter(run.task, run.world), run.strategy, not loader.is_whole
    numbers = torch.empty(0)  # of the samples that are still to be counted; a pipeline counts some at a time

    def count(outputs: Any, targets: Any) -> None:
        nonlocal numbers
        now, numbers = numbers.tensor_split([count_samples(targets)])
        if not strategy.counts:
            return
        sums = run.task.sums(outputs, targets, ignores)
        meter.add(0, sums.values, sums.counts)
        for report in reports:
            report.add(outputs, targets, now)
        if metrics is not None:
            metrics.add(run.task.scores(outputs), targets, now)

    with evaluating(run, loader):
        for number, part in enumerate(loader.evaluation(run.config.evaluation.batch_size), start=1):
            numbers = part.numbers
            strategy.evaluate(part, count)
            reporter.heartbeat()
            if (number < ASKED_EVERY or number % ASKED_EVERY == 0) and run.world.any_of([signals.stop_requested()])[0]:
                on_stop()
    means = meter.means(run.world.all_reduce_sum(meter.flush()))
    return means | ({} if metrics is None else metrics.compute(run))


@contextmanager
def evaluating(run: Run, loader: Loader) -> Iterator[None]:
    """Inside the block the model holds the averaged weights, and evaluates without gradients. After it, its buffers and
    all random states are what they were."""
    reporter.enter("evaluation")
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
    """After the block the buffers, and the weights of an embedding with max_norm, are what they were before it.

    Some modules change them in an evaluation, too, such as the observers of a quantisation: each rank by its share, and
    the training would go on with what the test data has left.
    """
    owned = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    owned += [(module, "weight") for module in embeddings if module.max_norm is not None]
    before = [(getattr(module, name), getattr(module, name).clone()) for module, name in owned]
    yield
    for (module, name), (tensor, copy) in zip(owned, before, strict=True):
        now = getattr(module, name)
        if now is tensor and now.shape == copy.shape:
            now.copy_(copy)
        else:
            setattr(module, name, copy)


class Metrics:
    """Metrics of torchmetrics over an evaluation, in float64.

    One that keeps samples, as AUROC does, gets those of all ranks, in the order of the data set. Of the others each
    rank has its share, and their states are brought together by their own rules.
    """

    def __init__(self, metrics: Mapping[str, Any], samples: int) -> None:
        self.samples, self.kept = samples, list[tuple[Tensor, Tensor, Tensor]]()  # (scores, targets, numbers)
        self.by_share = {name: metric for name, metric in metrics.items() if not keeps_samples(metric)}
        self.by_sample = {name: metric for name, metric in metrics.items() if name not in self.by_share}
        for metric in metrics.values():
            metric.reset()

    def add(self, scores: Tensor, targets: Tensor, numbers: Tensor) -> None:
        """numbers: (N,) of the samples in the data set."""
        for metric in self.by_share.values():
            if len(targets):
                metric.update(scores.double(), targets)
        if self.by_sample:
            self.kept.append((scores.double(), targets, numbers))

    def compute(self, run: Run) -> dict[str, float]:
        """{name: value}, the same on every rank. A collective."""
        world = run.world

        def gathered(state: Tensor, group: Any = None) -> list[Tensor]:
            states = state.new_zeros(world.size, *state.shape)
            states[world.rank] = state
            return list(world.all_reduce_sum(states))

        for name, metric in (self.by_share | self.by_sample).items():
            metric.dist_sync_fn = gathered
            metric.distributed_available_fn = lambda by_share=name in self.by_share: by_share and world.size > 1
        whole = self._whole(run) if self.by_sample else ()
        for metric in self.by_sample.values():
            metric.update(*whole)
        found = dict[str, float]()
        for name, metric in (self.by_share | self.by_sample).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of a rank without samples
                value = metric.compute()
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"evaluation.metrics.{name} gives {value}, and one number is wanted"
                raise ConfigError(f"{what}; type +evaluation.metrics.{name}.average=macro")
            found[name] = float(value)
        return found

    def _whole(self, run: Run) -> list[Tensor]:
        """The scores and targets of all samples, on every rank, in the order of the data set."""
        columns = [torch.cat(column) for column in zip(*self.kept, strict=True)]
        mine = [[list(column.shape[1:]), str(column.dtype).removeprefix("torch.")] for column in columns[:2]]
        forms = next(filter(None, run.world.all_gather_json(mine)))  # of a pipeline, one rank has the outputs
        wholes = []
        for place, (shape, dtype) in enumerate(forms):
            device = run.meter.device
            whole = torch.zeros(self.samples, *shape, dtype=torch.float64, device=device)
            if columns:
                whole[columns[2].to(device)] = columns[place].to(device, torch.float64)
            wholes.append(run.world.all_reduce_sum(whole).to(getattr(torch, dtype)))
        return wholes


def keeps_samples(metric: Any) -> bool:
    return any(isinstance(state, list) for state in metric.metric_state.values())


class SampleResults(Report):
    """What an evaluation says of each sample.

    samples: an attribute after `reduce`, how many were evaluated: some may have no label, or cannot be read. errors:
    {metric: standard error of its mean over the samples}; of an accuracy that is 0 or 1 their number tells it.
    """

    def __init__(self, task: Task, samples: int | None) -> None:
        """samples: of the split; None: of a stream, whose samples are counted only."""
        self.task, self.length = task, samples
        self.samples, self.errors = 0, dict[str, float]()
        self.kept = list[tuple[Tensor, Tensor]]()  # (numbers, rows of `ROW`)
        self.whole = torch.zeros(0, len(ROW))

    def add(self, outputs: Any, targets: Any, numbers: Tensor) -> None:
        self.samples += count_samples(targets)
        if self.length is None:
            return
        found = self.task(outputs, targets)
        loss = self._each(found["loss"], targets)
        row = {"seen": torch.ones_like(loss), "loss": loss}
        if "accuracy" in found:
            row |= {"right": self._each(found["accuracy"], targets), "is_right_known": torch.ones_like(loss)}
        if isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point():
            row |= {"target": as_float64(targets), "is_target_known": torch.ones_like(loss)}
            row["seen"] = row["seen"] if self.task.ignored is None else as_float64(targets != self.task.ignored)
        nothing = torch.zeros_like(loss)
        self.kept.append((numbers, torch.stack([row.get(name, nothing) for name in ROW], 1)))

    def _each(self, value: Tensor, targets: Any) -> Tensor:
        """(N,) float64: of values of targets the mean over those of a sample that count."""
        if value.dim() <= 1:
            return as_float64(value)
        counted = as_float64(torch.ones_like(targets) if self.task.ignored is None else targets != self.task.ignored)
        return (as_float64(value) * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)

    def reduce(self, world: World) -> None:
        self.samples = sum(world.all_gather_json(self.samples))
        if self.length is None:
            return
        whole = torch.zeros(self.length, len(ROW), dtype=torch.float64, device=float64_device(world.device))
        for numbers, rows in self.kept:
            whole[numbers.to(whole.device)] = rows.to(whole.device)
        self.whole = world.all_reduce_sum(whole).cpu()
        known = self.whole[self.whole[:, 0] > 0]
        for metric, column in (("loss", known[:, 1]), ("accuracy", known[:, 2])):
            is_known, is_binary = (
                metric == "loss" or bool(known[:, 3].any()),
                bool(((column == 0) | (column == 1)).all()),
            )
            if len(column) > 1 and is_known and (metric == "loss" or not is_binary):
                self.errors[metric] = float(column.std() / len(column) ** 0.5)

    def lines(self, loader: Loader) -> Iterator[str]:
        """Of a CSV file with the columns number, file, target, loss, right: those that there are."""
        seen, loss, right, has_right, target, has_target = self.whole.unbind(1)
        numbers = (seen > 0).nonzero().flatten().tolist()
        files, classes = files_of(loader), class_names(loader.reader.dataset)
        columns = {"number": numbers}
        if files:
            columns["file"] = [files[number] for number in numbers]
        if has_target.any():
            named = [int(one) for one in target[numbers].tolist()]
            columns["target"] = [classes[one] if 0 <= one < len(classes) else one for one in named]
        columns["loss"] = loss[numbers].tolist()
        if has_right.any():
            columns["right"] = [int(one) if one.is_integer() else one for one in right[numbers].tolist()]
        for row in ([*columns], *zip(*columns.values(), strict=True)):
            line = io.StringIO()
            csv.writer(line, lineterminator="\n").writerow(row)
            yield line.getvalue()


class Evaluator:
    """Evaluates `run` on the split `name`, "val" or "test". Images for `loggers` show `images` samples; 0: there are
    none. file: where rank 0 writes the results of each sample; None: nowhere.

    facts: an attribute, {"samples", "errors"} of the last evaluation, as in `SampleResults`, where there is a file.
    """

    def __init__(
        self,
        run: Run,
        loader: Loader,
        loggers: Loggers,
        images: int,
        name: str,
        metrics: Mapping[str, Any],
        file: Path | None = None,
    ) -> None:
        self.run, self.loader, self.loggers, self.images, self.name = run, loader, loggers, images, name
        self.metrics, self.file, self.facts = metrics, file, dict[str, Any]()

    def means(self, on_stop: Callable[[], NoReturn], *reports: Report) -> dict[str, float]:
        """As `evaluate`, which it calls. A collective. Raises TrainingDiverged if the loss is NaN or infinite."""
        metrics = Metrics(self.metrics, len(self.loader.reader)) if self.metrics else None
        means = evaluate(self.run, self.loader, on_stop, reports, metrics)
        if not math.isfinite(means["loss"]):
            raise self._diverged(means["loss"])
        for callback in self.run.callbacks:
            callback.on_evaluation(self.run, self.name, means)
        return means

    def __call__(self, on_stop: Callable[[], NoReturn], step: int | None = None) -> dict[str, float]:
        """As `means`, and the loggers get images of the weights of `step`; None: the present step. A collective."""
        loader, world = self.loader, self.run.world
        # A report counts samples to know their numbers, and shows some of them.
        length = None if loader.is_stream else len(loader.reader)
        shows = self.images > 0 and length is not None
        report = self.run.task.report(self.name, length or 0, self.images) if shows else None
        results = None if self.file is None else SampleResults(self.run.task, length)
        means = self.means(on_stop, *(one for one in (report, results) if one is not None))
        if results is not None and self.file is not None:
            results.reduce(world)
            self.facts = {"samples": results.samples, "errors": results.errors}
            if world.is_rank_zero and length is not None:
                write_samples(self.file, results, loader)
        if report is not None:
            report.reduce(world)
            figures = partial(report.figures, loader.shown, class_names(loader.reader.dataset))
            self.loggers.draw(self.name, figures, self.run.progress.step if step is None else step)
        return means

    def _diverged(self, loss: float) -> TrainingDiverged:
        """The error, with the samples that hold a NaN. A collective."""
        name = {"val": "validation"}.get(self.name, self.name)
        what, broken = f"the {name} loss is {loss} at step {self.run.progress.step}", broken_in(self.loader, self.run)
        if not broken:
            return TrainingDiverged(what, SMALLER_STEPS)
        return TrainingDiverged(f"{what}; in the {name} data {sentence_about(broken)}", OTHER_DATA)


def write_samples(file: Path, results: SampleResults, loader: Loader) -> None:
    """A full disk costs the file, and a warning."""
    try:
        write_whole(file, "".join(results.lines(loader)), sync=False)
    except OSError as error:
        log.warning("%s cannot be written (%s); the run goes on", file, error)


def images_wanted(loggers: Iterable[Mapping[str, Any]]) -> int:
    """How many samples a report of the task shows, as the config of these loggers asks; 0: there is no report."""
    return max((node.get("images") or 0 for node in loggers), default=0)


@dataclass(frozen=True)
class Evaluations:
    """What a run evaluates: `of_each`, each time one is due, and `test`, at the end; None: the test set stays shut."""

    of_each: Sequence[Evaluator]
    test: Evaluator | None

    def each(self) -> list[tuple[str, Evaluator]]:
        return [(evaluator.name, evaluator) for evaluator in self.of_each]
