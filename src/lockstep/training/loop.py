"""Train an epoch, and evaluate. The code is the same for any number of processes."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from lockstep.data.loader import BatchLoader
from lockstep.distributed import signals
from lockstep.distributed.signals import StopVote
from lockstep.errors import EXIT_STOPPED_WITHOUT_SNAPSHOT, StoppedEarly
from lockstep.failures import rank as monitor
from lockstep.tasks.base import Report
from lockstep.training.first_batch import require_sums
from lockstep.training.meter import Meter
from lockstep.training.setup import autocast
from lockstep.training.state import TrainState
from lockstep.training.step import TrainStepRunner
from lockstep.training.timing import StepTimer

AfterStep = Callable[[int], None]
"""Called after every step with the global number of samples since its last call. It may raise to stop."""


UNTIMED = StepTimer()  # it keeps nothing


def train_epoch(
    state: TrainState,
    loader: BatchLoader,
    timer: StepTimer = UNTIMED,
    after_step: Sequence[AfterStep] = (),
) -> int:
    """The rest of one epoch: from `state.progress.samples` to its end, or to `max_steps`. Returns the global samples.

    Each of `after_step` is called with the global number of samples since its last call. It may raise to stop.
    """
    progress, runner = state.progress, TrainStepRunner(state, loader, timer)
    progress.evaluation_pending = False
    monitor.enter("train")
    state.strategy.module.train()
    if progress.samples == 0:
        state.meter.clear()
    samples_before = progress.samples
    timer.phase("data")
    try:
        # Nothing is left if the run stopped early between its last step and the evaluation.
        for advance in state.strategy.train_steps(runner) if runner.steps_left > 0 else ():
            progress.samples += advance.samples
            progress.step += advance.steps
            monitor.step_ended(progress.epoch + 1, progress.step)
            timer.phase("logging")
            for callback in after_step:
                callback(advance.samples)
            timer.step_end(runner.full_steps_left)
            timer.phase("data")
            if runner.steps_left <= 0:
                break
    finally:
        timer.epoch_end()
    samples = progress.samples - samples_before
    if runner.samples_left <= 0:
        progress.epoch, progress.samples = progress.epoch + 1, 0
    return samples


def stop() -> NoReturn:
    """A rank was asked to stop, and there is nothing to save."""
    raise StoppedEarly("stopped early; the numbers are dropped, type the command again", EXIT_STOPPED_WITHOUT_SNAPSHOT)


def evaluate(
    state: TrainState, loader: BatchLoader, on_stop: Callable[[], NoReturn] = stop, report: Report | None = None
) -> dict[str, float]:
    """{metric: mean over every sample of the data set, each counted once}, with the averaged weights if there are any.

    A collective: every rank calls it and gets the same numbers. After a rank was asked to stop, the evaluation ends,
    its numbers are dropped, and `on_stop` is called on every rank. report: gets all outputs of this rank.
    """
    monitor.enter("evaluation")
    state.average_replicas()
    meter = Meter(state.task, state.strategy.world)
    context = autocast(state.strategy.world.device, state.settings.precision)

    def count(outputs: Tensor, targets: Tensor) -> None:
        if not state.first_batch_is_checked:  # training had no batch of two samples
            state.first_batch_is_checked = require_sums(state.task, outputs, targets)
        meter.add(state.task(outputs, targets)[1], state.task.count(targets))
        if report is not None:
            report.add(outputs, targets)

    stop, vote = False, StopVote(state.strategy.world, flags=1)
    state.strategy.module.eval()
    # Not inference_mode: buffers that FSDP creates inside it could not be used for training afterwards.
    with state.ema_weights(), torch.no_grad():
        state.strategy.sync_buffers()
        for inputs, targets in loader.eval_batches(state.settings.eval_batch_size):
            state.strategy.eval_step(inputs, targets, count, context)
            monitor.heartbeat()
            (stop,) = vote.cast(signals.stop_requested())
            if stop:
                break
    vote.close()
    if stop:
        on_stop()
    return meter.means()
