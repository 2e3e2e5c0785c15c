"""Train an epoch, and evaluate. The code is the same for any number of processes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.data.loader import BatchLoader
from lockstep.training.meter import Meter
from lockstep.training.setup import autocast
from lockstep.training.state import TrainState
from lockstep.training.step import TrainStepRunner
from lockstep.training.timer import StepTimer


def train_epoch(
    state: TrainState,
    loader: BatchLoader,
    timer: StepTimer,
    after_step: Sequence[Callable[[int], None]],
) -> int:
    """The rest of one epoch: from `state.progress.samples` to its end, or to `max_steps`. Returns the global samples.

    Each of `after_step` is called with the global number of samples since its last call. It may raise to stop.
    """
    progress, runner = state.progress, TrainStepRunner(state, loader, timer)
    state.strategy.module.train()
    if progress.samples == 0:
        state.meter.clear()
    samples_before = progress.samples
    timer.phase("data")
    try:
        for advance in state.strategy.train_steps(runner):
            progress.samples += advance.samples
            progress.step += advance.steps
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


def evaluate(state: TrainState, loader: BatchLoader) -> dict[str, float]:
    """{metric: mean over every sample of the data set, each counted once}, with the averaged weights if there are any.

    A collective: every rank calls it and gets the same numbers.
    """
    state.average_replicas()
    state.strategy.sync_buffers()
    meter = Meter(list(state.task.metrics), state.strategy.world)
    context = autocast(state.strategy.world.device, state.settings.precision)

    def count(outputs: Tensor, targets: Tensor) -> None:
        meter.add(state.task(outputs, targets)[1], len(targets))

    state.strategy.module.eval()
    # Not inference_mode: buffers that FSDP creates inside it could not be used for training afterwards.
    with state.ema_weights(), torch.no_grad():
        for inputs, targets in loader.eval_batches(state.settings.eval_batch_size):
            state.strategy.eval_step(inputs, targets, count, context)
    return meter.means()
