"""What ranks tell each other while they train: in one all-reduce now and then, never in a step. And now and then their
weights are compared: a flipped bit on one rank is found and named."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.distributed import signals
from lockstep.errors import ConfigError, RanksDiffer, first_of
from lockstep.loggers.base import Loggers
from lockstep.strategies.base import local_part
from lockstep.training.nonfinite import require_finite
from lockstep.training.run import Run
from lockstep.training.step import Step

if TYPE_CHECKING:
    from lockstep.snapshots.checkpointer import Checkpointer

PAUSE = 0.25  # seconds between two exchanges: a stop is heard within two of them
LONG = 2.0  # seconds of a stride from which on a result is read at once


@dataclass(eq=False)
class Exchange:
    """Sums of the losses, a wish to stop, rank 0's clock, and whether a weight was frozen or unfrozen. delayed: whether
    a result is read at the next exchange, so that the host never waits for a GPU. due: the step after which the
    next one is, the same on all ranks."""

    run: Run
    loggers: Loggers
    snapshots: "Checkpointer"
    delayed: bool

    def __post_init__(self) -> None:
        config = self.run.config
        self.every, self.weights_every = config.logging.every, config.watch.weights_every
        self.parameters = [*self.run.model.parameters()]
        self.flags = [parameter.requires_grad for parameter in self.parameters]
        self.pending: tuple[Any, Tensor, int, dict[str, Any]] | None = None  # (what waits, the vector, step, its log)
        self.stride, self.last_seconds, self.is_first = 1, 0.0, True
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """What came before the first step of an epoch, or of the rest of one, is no part of a step."""
        progress = self.run.progress
        self.speed_from = progress.samples, time.perf_counter()
        self.interval = self.last = progress.step, time.perf_counter()
        self._set_due()

    def _set_due(self) -> None:
        step, unit = self.run.progress.step, self.run.step.unit
        multiples = [every for every in (self.every, self.weights_every, self.snapshots.every_steps) if every]
        due = min(step + self.stride, *(step - step % every + every for every in multiples))
        self.due = -(-due // unit) * unit

    def __call__(self) -> bool:
        """Returns whether the run ends here. A collective: what it raises, all ranks raise."""
        run, step = self.run, self.run.progress.step
        if type(run.step).__call__ is Step.__call__:  # another one may have cleared some
            run.strategy.require_gradients()
        is_asked = self.drain(stops=False)  # nothing of this step is logged yet, and what starts here asks again
        self._start()
        if is_asked or not self.delayed or self.last_seconds > LONG:
            self.drain()
        if self.is_first:  # the first step of a process fills caches
            self.is_first, self.speed_from = False, (run.progress.samples, time.perf_counter())
        if run.average is not None:
            run.average.check()
        if self.weights_every and step % self.weights_every == 0:
            require_same_weights(run)
        if self.snapshots.due_after_step():
            self.drain()
            if not run.finished:  # the last step is saved when it is evaluated: a kill before repeats both
                self.snapshots.save()
        self._set_due()
        return run.finished

    def samples_per_second(self) -> float | None:
        """Of this epoch's steps, over all ranks. None if this process has trained none, but perhaps its first one."""
        (samples, start), done = self.speed_from, self.run.progress.samples
        return (done - samples) / (time.perf_counter() - start) if done > samples else None

    def _start(self) -> None:
        run, step, now = self.run, self.run.progress.step, time.perf_counter()
        has_changed = [parameter.requires_grad for parameter in self.parameters] != self.flags
        words = [float(signals.stop_requested()), float(has_changed), *[0.0] * 4]
        if run.world.is_rank_zero:  # whose clock alone counts
            seconds = now - self.last[1]
            fitting = int(PAUSE * (step - self.last[0]) / max(seconds, 1e-9))
            is_over, is_due = run.clock.seconds >= run.clock.limit, self.snapshots.due_by_clock()
            words[2:] = [float(is_over), float(is_due), max(1, min(fitting, 2 * self.stride)), seconds]
        self.last, logged = (step, now), dict[str, Any]()
        if step % self.every == 0:
            logged = {"train/lr": float(run.optimizer.param_groups[0]["lr"]), "train/grad_norm": run.step.grad_norm}
            first, start = self.interval
            if step > first:
                logged["speed/step_ms"] = 1000 * (now - start) / (step - first)
            self.interval = step, now
        told = torch.tensor(words, dtype=torch.float64).to(run.meter.device, non_blocking=True)
        vector = torch.cat([run.meter.flush(), told])
        wait = run.world.all_reduce_async(vector)
        if vector.is_cuda:
            wait()  # in the GPU's queue
            vector = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True).copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            wait = event.synchronize
        self.pending = wait, vector, step, logged

    def drain(self, stops: bool = True) -> bool:
        """Read what is under way, if there is anything: also before a save and at an epoch's end. Returns whether a
        rank is asked to stop. stops: stop then."""
        if self.pending is None:
            return False
        (wait, vector, step, logged), self.pending = self.pending, None
        wait()
        run, (*totals, stop, has_changed, is_over, is_due, stride, self.last_seconds) = self.run, vector.tolist()
        recent = run.meter.recent(totals, is_logged=bool(logged))
        require_finite(run, recent[0])
        if has_changed:
            what = "a weight was frozen or unfrozen since the training began, which no rank can follow"
            raise ConfigError(f"{what}; type parameters.freeze=[<it>], or leave it trained with an lr of its own")
        self.stride = int(stride)
        if logged:
            norm, means = logged.pop("train/grad_norm"), run.meter.means(recent)
            if norm is not None and bool(norm.isfinite()):
                logged["train/grad_norm"] = float(norm)
            if means:  # where all updates were left out, nothing is counted
                logged["train/running_loss"] = means["loss"]
            if run.step.skips:
                logged["watch/skipped_steps"] = run.progress.skipped
            self.loggers.log(logged, step)
        if is_over:
            run.clock.end_at(run.progress.step)
        if is_due:
            self.snapshots.ask()
        if stop and stops:
            self.snapshots.stop_after_step()
        return bool(stop)


def require_same_weights(run: Run) -> None:
    """Raise RanksDiffer, on all ranks, if those hold different weights that shall hold the same ones. A collective."""
    strategy, world, tensors = run.strategy, run.world, dict(run.model.named_parameters())
    apart = strategy.ranks_per_model  # ranks so far apart hold the same
    some_equal = strategy.gradient_sync.replicas_bitwise_equal and (strategy.replicas_equal or 1 < apart < world.size)
    if world.size == 1 or not (run.config.watch.weights_every and some_equal and tensors):
        return
    hashes = torch.stack([hash_of(local_part(tensor)).to(world.device) for tensor in tensors.values()]).tolist()
    of_all = world.all_gather_json(hash(tuple(hashes)))
    if all(total == of_all[rank % apart] for rank, total in enumerate(of_all)):
        return
    of_each, found = world.all_gather_json(hashes), list[str]()
    for rank, own in enumerate(of_each):
        first = rank % apart
        names = [name for name, ours, theirs in zip(tensors, own, of_each[first], strict=True) if ours != theirs]
        if names:
            found.append(f"rank {rank} has other values in {first_of(names, 3)} than rank {first}")
    what = f"the weights differ between ranks at step {run.progress.step}: {'; '.join(found)}"
    advice = "type the command again to go on from the last snapshot, with watch.weights_every=0"
    raise RanksDiffer(f"{what}; {advice} if ranks compute on different hardware")


def hash_of(tensor: Tensor) -> Tensor:
    """0-d int64 on the same device: every bit of `tensor` counts, and the order of values does not."""
    values = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    real = torch.view_as_real(values) if values.is_complex() else values
    if not real.numel():
        return torch.zeros((), dtype=torch.int64, device=real.device)
    exact = real.float() if real.element_size() < 4 else real  # it takes no float8
    return torch.hash_tensor(exact).view(torch.int64)
