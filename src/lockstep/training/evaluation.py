"""An evaluation, and what loggers get of it beside its means."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.compat import versions
from lockstep.data.dataset import class_names, count_samples
from lockstep.data.loader import BatchLoader
from lockstep.data.partition import fold_in
from lockstep.data.samples import EVALUATION
from lockstep.distributed import signals
from lockstep.distributed.signals import StopVote
from lockstep.distributed.world import World
from lockstep.errors import EXIT_STOPPED_WITHOUT_SNAPSHOT, StoppedEarly, TrainingDiverged
from lockstep.failures import reporter
from lockstep.loggers.base import Logger
from lockstep.tasks.base import Report, Share, counted
from lockstep.training.meter import Meter
from lockstep.training.nan import OTHER_DATA, SMALLER_STEPS, Broken, broken_samples, sentence_about
from lockstep.training.sample_noise import SampleNoise
from lockstep.training.setup import autocast
from lockstep.training.state import TrainState

log = logging.getLogger(__name__)

SCANNED = 128  # samples of an evaluation that are searched for a NaN together


def images_wanted(loggers: Iterable[Mapping[str, Any]]) -> int:
    """How many samples a report of the task shows, as the config of these loggers asks; 0: there is no report."""
    return max((node.get("images") or 0 for node in loggers), default=0)


class SampleCount(Report):
    """samples: an attribute, how many were evaluated: data that cannot be read may be left out."""

    def __init__(self) -> None:
        self.samples = 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        self.samples += count_samples(targets)

    def reduce(self, world: World) -> None:
        self.samples = sum(world.all_gather_json(self.samples))


def broken_in(loader: BatchLoader, world: World) -> list[Broken]:
    """The samples of an evaluation that hold NaN or infinite values. A collective."""
    batches = map(loader.read, loader.eval_shares(SCANNED))
    mine = [found for batch in batches for found in broken_samples(*batch)]
    return [found for rank in world.all_gather_json(mine) for found in rank]


def stop() -> NoReturn:
    """A rank was asked to stop, and there is nothing to save."""
    raise StoppedEarly("stopped early; the numbers are dropped, type the command again", EXIT_STOPPED_WITHOUT_SNAPSHOT)


def evaluate(
    state: TrainState, loader: BatchLoader, on_stop: Callable[[], NoReturn] = stop, report: Report | None = None
) -> dict[str, float]:
    """{metric: mean over every sample of the data set, each counted once}, with the averaged weights if there are any.

    A collective: every rank calls it and gets the same numbers. After a rank was asked to stop, the evaluation ends,
    its numbers are dropped, and `on_stop` is called on every rank.

    report: gets all outputs of this rank.
    """
    reporter.enter("evaluation")
    state.average_replicas()
    strategy = state.strategy
    meter = Meter(state.task, strategy.world)
    context = autocast(strategy.world.device, state.settings.precision)

    def count(outputs: Tensor, targets: Tensor) -> None:
        state.early_steps.check_outputs(outputs, targets)  # training may have had no batch of two samples
        meter.add(state.task(outputs, targets)[1], counted(state.task, targets))
        if report is not None:
            report.add(outputs, targets)

    is_stopped, vote = 0, StopVote(strategy.world, flags=1)
    strategy.module.eval()
    # Not inference_mode: buffers that FSDP creates inside it could not be used for training afterwards.
    with state.ema_weights(), torch.no_grad(), loader.evaluation_draws():
        strategy.sync_buffers()
        batches = loader.eval_batches(state.settings.eval_batch_size)
        with buffers_kept(strategy.model):
            for (inputs, targets), draws in zip(batches, draws_of_samples(state, loader), strict=False):
                with draws:
                    strategy.eval_step(inputs, targets, count, context)
                reporter.heartbeat()
                (is_stopped,) = vote.cast(signals.stop_requested())
                if is_stopped:
                    break
    vote.close()
    if is_stopped:
        on_stop()
    return meter.means()


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """After the block the buffers, and the weights of an embedding with max_norm, are what they were before it.

    Some modules change them in an evaluation, too, such as the observers of a quantisation: each rank by its share, and
    the training would go on with what the test data has left.
    """
    owned = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    owned += [(module, "weight") for module in embeddings if module.max_norm is not None]
    before = [getattr(module, name) for module, name in owned]
    copies, changes = [buffer.clone() for buffer in before], versions(before)
    yield
    for (module, name), buffer, copy, version in zip(owned, before, copies, changes, strict=True):
        now = getattr(module, name)
        if now is buffer and versions([now]) == [version]:
            continue
        if now is buffer and now.shape == copy.shape:
            now.copy_(copy)
        else:
            setattr(module, name, copy)


def draws_of_samples(state: TrainState, loader: BatchLoader) -> Iterator[AbstractContextManager[Any]]:
    """For each of `loader.eval_batches` a block, in which a sample draws the same on any number of ranks.

    It begins when the batch was read, which may draw, too.
    """
    noise = SampleNoise()
    for numbers in loader.eval_numbers(state.settings.eval_batch_size):
        if state.noise is None or not noise.is_needed:
            yield nullcontext()
        else:
            torch.manual_seed(fold_in(loader.seed, EVALUATION))
            yield noise.of_evaluation(numbers)


class Evaluator:
    """Evaluates `state` on the set `name`, "val" or "test". A report for `logger` shows `images` samples; 0: none."""

    def __init__(self, state: TrainState, loader: BatchLoader, logger: Logger, images: int, name: str) -> None:
        self.state, self.loader, self.logger, self.images, self.name = state, loader, logger, images, name

    def means(self, on_stop: Callable[[], NoReturn], report: Report | None = None) -> dict[str, float]:
        """As `evaluate`, which it calls. A collective. Raises TrainingDiverged if the loss is NaN or infinite."""
        means = evaluate(self.state, self.loader, on_stop, report)
        self.state.early_steps.watch_metrics(means)
        if not math.isfinite(means["loss"]):
            raise self._diverged(means["loss"])
        return means

    def __call__(self, on_stop: Callable[[], NoReturn]) -> dict[str, float]:
        """As `means`, and the logger gets the report. A collective."""
        loader, report = self.loader, None
        # A report counts samples to know their numbers, and shows some of them.
        if self.images > 0 and not loader.leaves_out and not loader.is_stream:
            share = Share(loader.rank, loader.size, len(loader.evaluated), self.name)
            report = self.state.task.report(share, self.images)
        means = self.means(on_stop, report)
        if report is not None:
            report.reduce(self.state.strategy.world)
            classes, step = class_names(loader.dataset), self.state.progress.step
            self.logger.log_report(report, loader.shown_sample, classes, step, self.name)
        return means

    def _diverged(self, loss: float) -> TrainingDiverged:
        """The error, with the samples that hold a NaN. A collective."""
        broken = broken_in(self.loader, self.state.strategy.world)
        name = {"val": "validation"}.get(self.name, self.name)
        what = f"the {name} loss is {loss} at step {self.state.progress.step}"
        if not broken:
            return TrainingDiverged(what, SMALLER_STEPS)
        return TrainingDiverged(f"{what}; in the {name} data {sentence_about(broken)}", OTHER_DATA)


@dataclass(frozen=True)
class Evaluations:
    """What a run evaluates.

    decides: "val", the set of the objective; None: nothing chooses.
    at_each: by name, those of each evaluation.
    test: of the end, with the weights that were chosen; None: the test set stays shut.
    """

    decides: str | None
    at_each: Mapping[str, Evaluator]
    test: Evaluator | None
