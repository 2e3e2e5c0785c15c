"""What ranks tell each other while they train: in one all-reduce now and then, never in a step."""

import time
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lockstep.distributed import signals
from lockstep.errors import ConfigError
from lockstep.loggers.base import Loggers
from lockstep.training.nonfinite import diverged
from lockstep.training.replicas import require_same_weights
from lockstep.training.run import Run

if TYPE_CHECKING:
    from lockstep.snapshots.checkpointer import Checkpointer

PAUSE = 0.25  # seconds between two exchanges: a stop is heard within two of them
LONG = 2.0  # seconds of a stride from which on a result is read at once
WORDS = ("stop", "changed", "time", "save", "stride", "seconds")  # after the sums of the meter


class Now(NamedTuple):
    """What this rank has at an exchange. seconds: of `time.perf_counter`."""

    step: int
    seconds: float
    lr: float
    grad_norm: Tensor | None


class Exchange:
    """Sums of the losses, a wish to stop, rank 0's clock, and whether a weight was frozen or unfrozen.

    delayed: whether a result is read at the next exchange, so that the host never waits for a GPU. Else at once.
    due: an attribute, the step after which the next exchange is: the same on all ranks.
    """

    def __init__(self, run: Run, loggers: Loggers, snapshots: "Checkpointer", delayed: bool) -> None:
        self.run, self.loggers, self.snapshots, self.delayed = run, loggers, snapshots, delayed
        self.world, self.every = run.world, run.config.logging.every
        self.weights_every = run.config.watch.weights_every
        self.pending: tuple[Any, Tensor, Now] | None = None  # (what is waited for, the vector, when)
        self.flags, self.stride, self.last_seconds, self.is_first = self._flags(), 1, 0.0, True
        self.width = 2 * len(run.meter.names)
        self.reported = torch.zeros(self.width, dtype=torch.float64)  # the sums at the last log of this epoch
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Before the first step of an epoch, or of the rest of one. What came before, such as an evaluation, is no part
        of a step."""
        step = self.run.progress.step
        self.speed_from = self.run.progress.samples, time.perf_counter()
        self.interval, self.last = (step, time.perf_counter()), (step, time.monotonic())
        if self.run.progress.samples == 0:
            self.reported.zero_()
        self._set_due()

    def _set_due(self) -> None:
        step = self.run.progress.step
        intervals = [self.every, self.weights_every, self.snapshots.every_steps]
        next_ones = [step + self.stride, *(step - step % every + every for every in intervals if every)]
        unit = self.run.step.unit
        self.due = -(-min(next_ones) // unit) * unit

    def __call__(self) -> bool:
        """Returns whether the run ends here. A collective.

        Raises TrainingDiverged, StoppedEarly, ConfigError and RanksDiffer, each on all ranks.
        """
        self.drain()
        self._start()
        if not self.delayed or self.last_seconds > LONG:
            self.drain()
        progress = self.run.progress
        if self.is_first:  # the first step of a process fills caches
            self.is_first, self.speed_from = False, (progress.samples, time.perf_counter())
        if self.run.average is not None:
            self.run.average.check()
        if self.weights_every and progress.step % self.weights_every == 0:
            require_same_weights(self.run)
        if self.snapshots.due_after_step():
            self.drain()
            self.snapshots.save()
        self._set_due()
        return self.run.finished

    def samples_per_second(self) -> float | None:
        """Of this epoch's steps, over all ranks. None if this process has trained none, but perhaps its first one."""
        (samples, start), done = self.speed_from, self.run.progress.samples
        return (done - samples) / (time.perf_counter() - start) if done > samples else None

    def _start(self) -> None:
        step, now = self.run.progress.step, time.monotonic()
        words = dict.fromkeys(WORDS, 0.0)
        words["stop"], words["changed"] = float(signals.stop_requested()), float(self._flags() != self.flags)
        if self.world.is_rank_zero:
            steps, seconds = step - self.last[0], now - self.last[1]
            fitting = int(PAUSE * steps / max(seconds, 1e-9))
            words |= {"time": float(self.run.clock.is_over), "save": float(self.snapshots.due_by_clock())}
            words |= {"stride": float(max(1, min(fitting, 2 * self.stride))), "seconds": seconds}
        self.last = step, now
        here = Now(step, time.perf_counter(), float(self.run.optimizer.param_groups[0]["lr"]), self.run.step.grad_norm)
        told = torch.tensor([*words.values()], dtype=torch.float64).to(self.run.meter.device, non_blocking=True)
        vector = torch.cat([self.run.meter.flush(), told])
        wait = self.world.all_reduce_async(vector)
        if vector.is_cuda:
            wait()  # in the GPU's queue
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True).copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.pending = event.synchronize, host, here
        else:
            self.pending = wait, vector, here

    def drain(self) -> None:
        """Read what is under way, if there is anything: also before a save and at an epoch's end."""
        if self.pending is None:
            return
        (wait, vector, then), self.pending = self.pending, None
        wait()
        totals, told = vector[: self.width], dict(zip(WORDS, vector[self.width :].tolist(), strict=True))
        run, progress = self.run, self.run.progress
        recent = totals - self.reported
        if not torch.isfinite(recent[0]):
            raise diverged(run, f"the loss is {float(recent[0])}", run.meter.first_non_finite())
        if told["changed"]:
            what = "a weight was frozen or unfrozen since the training began, which no rank can follow"
            raise ConfigError(
                f"{what}; type parameters.freeze=[<it>], or leave it trained, with a learning rate of its own"
            )
        self.stride, self.last_seconds = int(told["stride"]), told["seconds"]
        if then.step % self.every == 0:
            self._log(then, recent)
            self.reported = totals.clone()
        if told["time"]:
            run.clock.end_at(progress.step)
        if told["save"]:
            self.snapshots.ask()
        if told["stop"]:
            self.snapshots.stop_before_evaluation()

    def _log(self, then: Now, recent: Tensor) -> None:
        means = self.run.meter.means(recent)
        # Where all updates were left out, nothing is counted, and there is no loss.
        metrics = {"train/running_loss": means["loss"]} if means else {}
        metrics["train/lr"] = then.lr
        if then.grad_norm is not None and bool(then.grad_norm.isfinite()):
            metrics["train/grad_norm"] = float(then.grad_norm)
        first, start = self.interval
        if then.step > first:
            metrics["speed/step_ms"] = 1000 * (then.seconds - start) / (then.step - first)
        self.interval = then.step, then.seconds
        if self.run.step.skip is not None:
            metrics["watch/skipped_steps"] = self.run.step.skip.skipped
        self.loggers.log(metrics, then.step)

    def _flags(self) -> int:
        """A checksum of which weights are trained."""
        return zlib.crc32(bytes(parameter.requires_grad for parameter in self.run.model.parameters()))
