"""The training of a run, from its first epoch to its last evaluation. It is the same for any number of processes."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.data.loader import BatchLoader
from lockstep.data.partition import Batch, LoadedPart, Part, fold_in, seed_numpy_and_random
from lockstep.failures import reporter
from lockstep.loggers.base import EpochSummary, Logger
from lockstep.snapshots.manager import SnapshotManager
from lockstep.tasks.base import counted
from lockstep.training.evaluation import Evaluations
from lockstep.training.setup import autocast
from lockstep.training.state import TrainState
from lockstep.training.timing import StepTimer
from lockstep.training.watchers import Watcher

UNTIMED = StepTimer()  # it keeps nothing
UPDATE = -1  # in the place of the number of a part: what the optimizer draws


def fit(
    state: TrainState,
    loader: BatchLoader,
    evaluations: Evaluations,
    snapshots: SnapshotManager,
    loggers: Logger,
    watchers: Sequence[Watcher],
    timer: StepTimer,
    run_dir: Path,
    tested: Mapping[str, Any] | None = None,
) -> float | None:
    """Train epoch by epoch, evaluate, save; test once, with the weights that were chosen. Returns the objective of
    these weights, None if nothing chooses.

    loader: of the training data.
    tested: {"step": of the weights, "metrics"} of the test, if an earlier start of this run has read the test set.
    watchers: called in their order; the last one saves snapshots, at a step, after minutes, or when the run is stopped.
    """
    settings, progress, speed = state.settings, state.progress, Speed()
    decides = evaluations.decides
    objective = "" if state.objective is None else state.objective[0].partition("/")[2]
    train = state.strategy.own_epoch() or train_epoch
    evaluated: dict[str, dict[str, float]] = {}
    state.set_clock(state.seconds_before)  # the time begins
    with snapshots.explaining_errors():
        while not state.finished:
            epoch, samples_before = progress.epoch + 1, progress.samples
            reporter.epoch_starts(epoch)
            loggers.on_epoch_start(epoch, settings.epochs, len(loader), samples_before)
            samples = train(state, loader, timer, [*watchers, speed])
            means = state.nan.require_finite(state.meter.means(), progress.step)
            count = state.meter.counted
            # All updates may have been left out, or a resumed run measures something else: then nothing was counted.
            metrics = {"train": means} if count else {}
            samples_per_second, counted_per_second = speed.of(samples), dict[str, float]()
            if state.task.counts != "samples" and samples_per_second is not None:
                per_sample = count / (samples_before + samples)
                counted_per_second[state.task.counts] = samples_per_second * per_sample
            loggers.log_metrics(state.strategy.epoch_metrics(), progress.step)
            if state.evaluation_due:
                evaluated = {
                    name: evaluate(snapshots.stop_before_evaluation) for name, evaluate in evaluations.at_each.items()
                }
                metrics |= evaluated
                if decides is not None and state.update_best(evaluated[decides][objective]):
                    snapshots.save("best")
            summary = EpochSummary(
                epoch=epoch,
                epochs=settings.epochs,
                step=progress.step,
                metrics=metrics,
                samples_per_second=samples_per_second,
                best={} if progress.best is None else {objective: progress.best},
                best_step=progress.best_step,
                counted_per_second=counted_per_second,
            )
            loggers.on_epoch_end(summary)
            snapshots.after_epoch()
        if not evaluated:  # nothing is evaluated at each epoch, or a finished run was started again: all is logged
            evaluated = {name: evaluate.means(snapshots.stop) for name, evaluate in evaluations.at_each.items()}
        reporter.enter("export")
        snapshots.export()
        if evaluations.test is not None and state.reached_limit != "trainer.pause_after":
            chosen = progress.step if progress.best_step is None else progress.best_step
            known = None if tested is None or tested["step"] != chosen else tested["metrics"]
            if known is not None:
                test = known
            elif "test" in evaluated and chosen == progress.step:
                test = evaluated["test"]
            else:
                chosen = snapshots.take_best_weights()
                test = evaluations.test(snapshots.stop_before_test)
            loggers.on_test(test, chosen, known is not None or "test" in evaluated)
    last = {} if decides is None else evaluated[decides]
    loggers.on_fit_end(run_dir, last)
    return progress.best if progress.best is not None else last.get(objective)


def train_epoch(
    state: TrainState, loader: BatchLoader, timer: StepTimer = UNTIMED, watchers: Sequence[Watcher] = ()
) -> int:
    """The rest of one epoch: from `state.progress.samples` to its end, or to a limit. Returns the global samples.

    The gradient of a step is that of the mean over the global batch, see `StepLoss`.
    """
    progress, strategy, start = state.progress, state.strategy, state.progress.samples
    precision = autocast(strategy.world.device, state.settings.precision)
    begin_epoch(state, watchers)
    timer.phase("data")
    try:
        for batch in batches(state, loader):
            step = progress.step + 1
            reporter.current_batch(batch)
            state.nan.begin(step, progress.epoch, batch)
            loss = StepLoss(state, batch, step, timer)
            for number, part in enumerate(batch.parts, start=1):
                timer.phase("forward")
                state.early_steps.check_inputs(part.inputs, batch.count // state.early_steps.parts)
                is_last = number == len(batch.parts)
                draws = draws_of(state, loader.seed, step, batch, part)
                with draws, state.early_steps.watching_draws():
                    strategy.forward_backward(part.inputs, part.targets, loss, precision, is_last)
                if is_last or state.settings.gradient_accumulation_steps > 1:  # virtual ranks agree after the last
                    state.buffers.after_pass(step, len(part.indices))
            timer.phase("optimizer")
            state.after_backward(step)
            for watcher in watchers:
                watcher.on_gradients_ready()
            set_seed(fold_in(loader.seed, step - 1, UPDATE))  # of an optimizer that draws: the same on all ranks
            update(state, step)
            end_steps(state, batch.count, 1, timer, watchers)
            timer.step_end(state.whole_steps_left)
            if state.time_is_up:
                break
            timer.phase("data")
    finally:
        timer.epoch_end()
    samples = progress.samples - start
    state.end_epoch()
    return samples


def begin_epoch(state: TrainState, watchers: Sequence[Watcher]) -> None:
    """Before the first step of an epoch, or of the rest of one."""
    reporter.enter("train")
    state.begin_epoch()
    for watcher in watchers:
        watcher.on_epoch_start()


def end_steps(state: TrainState, samples: int, steps: int, timer: StepTimer, watchers: Sequence[Watcher]) -> None:
    """After `steps` optimizer steps over `samples` global samples, when all ranks hold the same weights again."""
    state.advance(samples, steps)
    reporter.step_ended(state.progress.epoch + 1, state.progress.step)
    timer.phase("logging")
    for watcher in watchers:
        watcher.after_step(samples)


def batches(state: TrainState, loader: BatchLoader, turns: slice = slice(None)) -> Iterator[Batch]:
    """This rank's parts of the epoch's remaining batches, one optimizer step each.

    Nothing is left if the run stopped early between its last step and the evaluation.

    turns: which of these batches, for ranks that take turns.
    """
    settings, progress = state.settings, state.progress

    def parts(batch: Tensor) -> list[Part]:
        return state.strategy.parts(batch, settings.gradient_accumulation_steps)

    epoch = loader.epoch(progress.epoch, settings.batch_size, parts, progress.samples, turns, settings.last_epoch)
    return islice(epoch, len(range(state.steps_left)[turns]))


class StepLoss:
    """(outputs, targets) -> the loss of these samples, as it is minimised. Its sums go to the meter.

    Losses are summed over samples and divided by the true global count, and multiplied by what gradient averaging
    divides by. A mean of ranks' means would be wrong wherever ranks have unequally many samples or tokens. The count is
    a collective if the task has its own. For fp16 the loss is scaled. The early checks look at outputs and loss.

    step: its number, counted from 1.
    """

    def __init__(self, state: TrainState, batch: Batch, step: int, timer: StepTimer = UNTIMED) -> None:
        self.state, self.step, self.timer = state, step, timer
        strategy = state.strategy
        self.counts_samples, self.scales = strategy.counts_samples(), state.scaler.is_enabled()
        self.weight: float | Tensor = strategy.gradient_divide_factor() / batch.count
        counts = [count for part in batch.parts if isinstance(count := counted(state.task, part.targets), Tensor)]
        if counts:
            total = strategy.sum_counts(torch.stack(counts))
            self.weight = strategy.gradient_divide_factor() / total.where(total > 0, 1)  # of nothing, the loss is 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        state, weight = self.state, self.weight
        state.early_steps.check_outputs(outputs, targets)
        loss, sums = state.task(outputs, targets)
        state.early_steps.watch_loss(loss, outputs, targets)
        if self.counts_samples:
            state.meter.add(sums, counted(state.task, targets), self.step)
        loss = loss * (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight)
        if self.scales:
            loss = state.scaler.scale(loss)
        self.timer.phase("backward")
        return loss


def update(state: TrainState, step: int) -> None:
    """One optimizer step with the gradients in `.grad`: clipping, loss scaling, schedule and moving average.

    step: its number, counted from 1.
    Raises TrainingDiverged as `NanPolicy.accepts` does.
    """
    optimizer, scaler = state.optimizer, state.scaler
    gradients = state.trained.gradients(step)
    if state.nan.accepts(step, gradients):
        state.keep_grad_norm(step)
        if state.settings.max_grad_norm is not None:
            scaler.unscale_(optimizer)
            state.strategy.clip_grad_norm(state.settings.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        if state.ema is not None:
            state.ema.update()
    else:  # torch warns of a schedule that steps before the first update
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    optimizer.zero_grad(set_to_none=True)
    state.scheduler.step()


def draws_of(state: TrainState, seed: int, step: int, batch: Batch, part: LoadedPart) -> AbstractContextManager[Any]:
    """Seeds torch, numpy and random, and returns the block in which `part` is passed forward and backward.

    numpy and random give all parts the same numbers: one that decides about a layer, or mixes a batch, is that of one
    process. So does torch where `SampleNoise` sees no draw; without one, each part draws its own.

    step: the number of the optimizer step, counted from 1.
    """
    seed_numpy_and_random(fold_in(seed, step - 1))
    if state.noise is None:
        set_seed(fold_in(seed, step - 1, part.number))
        return nullcontext()
    set_seed(fold_in(seed, step - 1))
    if not state.noise.is_needed:
        return state.noise.unwatched(len(part.indices) < batch.count)
    return state.noise.of(part.start, len(part.indices), batch.count)


def set_seed(seed: int) -> None:
    """Seed what dropout draws from. torch.manual_seed does this too, and takes 0.5 ms where torch could use a GPU."""
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


class Speed(Watcher):
    """Samples per second of an epoch's steps, without the first step of this process: that fills caches."""

    def __init__(self) -> None:
        self.start, self.has_stepped = 0.0, False
        self.left_out = 0  # samples of this epoch that came before `start`

    def on_epoch_start(self) -> None:
        self.start, self.left_out = time.perf_counter(), 0

    def after_step(self, samples: int) -> None:
        if not self.has_stepped:
            self.has_stepped, self.first_end, self.left_out = True, time.perf_counter(), samples

    def of(self, samples: int) -> float | None:
        """samples: of all ranks in this epoch. None if there were none: a resumed run has only its evaluation left."""
        if samples == 0:
            return None
        if 0 < self.left_out < samples:
            return (samples - self.left_out) / (time.perf_counter() - self.first_end)
        return samples / (time.perf_counter() - self.start)
