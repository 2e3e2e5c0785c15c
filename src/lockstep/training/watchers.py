"""What looks at a run while it trains, step by step, and what is reported of its steps."""

import math
import time

import torch

from lockstep.data.dataset import float64_device
from lockstep.loggers.base import Logger
from lockstep.training.state import TrainState
from lockstep.training.timing import used_memory


class Watcher:
    """What looks at a run while it trains, or saves it, on every rank. It may raise to stop. Here it does nothing."""

    def on_epoch_start(self) -> None:
        """The first step of an epoch, or of the rest of one, is about to begin."""

    def on_gradients_ready(self) -> None:
        """The gradients of a step are there, averaged if they are averaged in each step, and not clipped yet."""

    def after_step(self, samples: int) -> None:
        """A step has ended. samples: of all ranks since the last call; a strategy may report several steps at once."""


class RunningMetrics(Watcher):
    """Tells the loggers of every step. Every `log_every` steps it reports the loss, the learning rate and more.

    The memory of each rank is exchanged in the same all-reduce as the loss.
    """

    def __init__(self, state: TrainState, logger: Logger) -> None:
        self.state, self.logger = state, logger
        self.last_step = 0
        self.interval = (0, time.perf_counter())  # when the first step after the last report began

    def on_epoch_start(self) -> None:
        """What came since the last step, such as an evaluation, is no part of a step."""
        self.last_step = self.state.progress.step
        self.interval = (self.last_step, time.perf_counter())

    def after_step(self, samples: int) -> None:
        """Raises TrainingDiverged, on all ranks, if the loss is not finite."""
        step = self.state.progress.step
        before, self.last_step = self.last_step, step  # a strategy may report several steps at once
        is_logged = self.state.settings.is_logged(step, step - before)
        self.logger.on_step(step, samples)
        if not is_logged:
            return
        world = self.state.strategy.world
        memory = torch.zeros(world.size, dtype=torch.float64, device=float64_device(world.device))
        memory[world.rank] = used_memory(world.device)
        means = self.state.nan.require_finite(self.state.meter.means_since_last(beside=memory), step)
        self.state.early_steps.watch_metrics(means)
        loss = means["loss"]
        learning_rate = float(self.state.scheduler.get_last_lr()[0])
        # Where all updates were left out, nothing is counted, and there is no loss.
        metrics = {"train/running_loss": loss} if self.state.meter.counted else {}
        metrics |= {"train/lr": learning_rate} | self._grad_norm(before, step) | self._step_time(step)
        used = memory.tolist()
        metrics |= {"world/largest_rank_mib": max(used), "world/smallest_rank_mib": min(used)}
        if self.state.nan.action == "skip":
            metrics["watch/skipped_steps"] = self.state.nan.skipped
        self.logger.log_metrics(metrics, step)

    def _grad_norm(self, before: int, step: int) -> dict[str, float]:
        """The newest one of the steps after `before` up to `step`."""
        if self.state.grad_norm is None or not before < self.state.grad_norm[0] <= step:
            return {}
        norm = float(self.state.grad_norm[1])
        return {"train/grad_norm": norm} if math.isfinite(norm) else {}

    def _step_time(self, step: int) -> dict[str, float]:
        """The mean over the steps since the last report. The report of the loss has waited for the device."""
        now = time.perf_counter()
        (first, start), self.interval = self.interval, (step, now)
        return {"speed/step_ms": 1000 * (now - start) / (step - first)} if step > first else {}
