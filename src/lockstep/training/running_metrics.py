"""The metrics of the last few steps, and the check that the loss is still a number."""

import math
import time
from typing import Protocol

import torch

from lockstep.training.memory import used_memory
from lockstep.training.state import TrainState
from lockstep.training.straggler import StragglerWatch


class StepLogger(Protocol):
    """What a logger offers in every step, see `lockstep.loggers.base.Logger`."""

    def on_step(self, step: int, samples: int) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...


class RunningMetrics:
    """Called after every step on every rank. Every `log_every` steps it reports the loss, the learning rate and more.

    logger: takes metrics by tag. stragglers: an attribute; its times are exchanged and logged with the loss. What
    differs between ranks is exchanged in the same all-reduce as the loss.
    """

    def __init__(self, state: TrainState, logger: StepLogger) -> None:
        self.state, self.logger = state, logger
        self.stragglers: StragglerWatch | None = None
        self.last_step = state.progress.step
        self.logged_step = self.last_step
        self.interval = (self.last_step, time.perf_counter())  # when the first step after the last report began

    def epoch_start(self) -> None:
        """What came since the last step, such as an evaluation, is no part of a step."""
        self.interval = (self.state.progress.step, time.perf_counter())

    def after_step(self, samples: int) -> None:
        """Raises TrainingDiverged, on all ranks, if the loss is not finite."""
        step = self.state.progress.step
        is_logged = self.state.settings.is_logged(step, step - self.last_step)  # a strategy may report several at once
        self.last_step = step
        self.logger.on_step(step, samples)
        if not is_logged:
            return
        world, stragglers = self.state.strategy.world, self.stragglers
        memory = torch.zeros(world.size, dtype=torch.float64, device=world.device)
        memory[world.rank] = used_memory(world.device)
        beside = memory if stragglers is None else torch.cat([memory, stragglers.own_times()])
        loss = self.finite(self.state.meter.means_since_last(beside))["loss"]
        learning_rate = float(self.state.scheduler.get_last_lr()[0])
        # Where all updates were left out, nothing is counted, and there is no loss.
        metrics = {"train/running_loss": loss} if self.state.meter.counted else {}
        metrics |= {"train/lr": learning_rate} | self._grad_norm(step) | self._step_time(step)
        if stragglers is not None:
            metrics |= stragglers.report(beside[world.size :])
        used = beside[: world.size].tolist()
        metrics |= {"world/largest_rank_mib": max(used), "world/smallest_rank_mib": min(used)}
        if self.state.nan.action == "skip":
            metrics["watch/skipped_steps"] = self.state.nan.skipped
        if step > self.logged_step:  # after a rollback the same steps come again, with the same numbers
            self.logger.log_metrics(metrics, step)
            self.logged_step = step

    def _grad_norm(self, step: int) -> dict[str, float]:
        if self.state.grad_norm is None or self.state.grad_norm[0] != step:
            return {}
        norm = float(self.state.grad_norm[1])
        return {"train/grad_norm": norm} if math.isfinite(norm) else {}

    def _step_time(self, step: int) -> dict[str, float]:
        """The mean over the steps since the last report. The report of the loss has waited for the device."""
        now = time.perf_counter()
        (first, start), self.interval = self.interval, (step, now)
        return {"speed/step_ms": 1000 * (now - start) / (step - first)} if step > first else {}

    def finite(self, means: dict[str, float]) -> dict[str, float]:
        """`means`, the same on all ranks. Raises TrainingDiverged if their loss is NaN or infinite."""
        if not math.isfinite(means["loss"]):
            raise self.state.nan.non_finite_loss(means["loss"], self.state.progress.step)
        return means
