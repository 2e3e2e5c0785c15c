"""Train and evaluate. Nothing here knows how many processes there are."""

import math
import os
from dataclasses import dataclass, field

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.data import draw
from lockstep.meter import Meter
from lockstep.strategy import accumulating, bare


@dataclass
class Progress:
    """How far a run is: whole epochs done, samples of the current epoch used, optimizer steps done; and how good it was.

    best: the best evaluation so far; stale: how many evaluations have passed since.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    best: float | None = None
    stale: int = 0

    def advance(self, samples):
        self.samples, self.step = self.samples + samples, self.step + 1

    def finish_epoch(self):
        self.epoch, self.samples = self.epoch + 1, 0

    def judge(self, value, lower_is_better):
        """Note an evaluation, the same number on every rank; True if it is the best so far. NaN never is."""
        better = value < self.best if lower_is_better and self.best is not None else self.best is None or value > self.best
        if better and not math.isnan(value):
            self.best, self.stale = value, 0
        else:
            self.stale += 1
        return self.stale == 0


@dataclass
class Run:
    """What a training changes as it goes, and therefore what a snapshot holds."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    meter: Meter
    average: AveragedModel | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def judged(self):
        """The net that is evaluated and exported: the average of the weights where there is one."""
        return bare(self.model) if self.average is None else self.average.module


def average(net, decay):
    """An exponential moving average of the weights (Polyak and Juditsky 1992), or None for no decay; buffers are the latest."""
    return None if decay is None else AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))


def settle(seed, deterministic):
    """Seed the initial weights; with `deterministic`, take only algorithms that give the same bits every time."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def place(net, world, precision, channels_last, compile):
    """The net on its device, in the layout and type it computes in; "auto" is channels_last for nets with convolutions.

    On a CPU channels_last makes the convolution net 1.4 times as fast: max-pooling hates the other layout.
    """
    convolves = any(isinstance(module, torch.nn.Conv2d) for module in net.modules())
    net = net.to(world.device, torch.float64 if precision == "fp64" else torch.float32)
    if convolves if channels_last == "auto" else channels_last:
        net = net.to(memory_format=torch.channels_last)
    if compile:
        net.compile()
    return net


def steps(samples, batch_size, epochs, max_steps):
    """(optimizer steps in an epoch, optimizer steps in the run)."""
    epoch_steps = -(-samples // batch_size)
    return epoch_steps, min(epochs * epoch_steps, max_steps or epochs * epoch_steps)


def scaler(world, precision):
    """Loss scaling for fp16 (Micikevicius et al. 2018); a pass-through for the other precisions."""
    return torch.amp.GradScaler(world.device.type, enabled=precision == "fp16")


def precise(device, precision):
    """The autocast context of `precision`: fp32 and fp64 compute in the parameters' own type."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, types.get(precision), enabled=precision in types)


def train(run, loader, loss, batch_size, accumulate, clip_norm, precision, max_steps, after_step):
    """The rest of one epoch: from run.progress.samples to its end, or to max_steps.

    The gradient of a step is the gradient of the mean over the global batch: sums over samples, divided by the true
    global count, times the world size that gradient averaging divides by. Means of ranks' means would be wrong
    wherever shares are unequal. `after_step(samples)` is called after each step; it may raise to end the training.
    """
    model, optimizer, scaler, progress, world = run.model.train(), run.optimizer, run.scaler, run.progress, loader.world
    if progress.samples == 0:
        run.meter.clear()
    for batch in loader.epoch(progress.epoch, batch_size, accumulate, skip=progress.samples):
        torch.manual_seed(draw(loader.seed, progress.step, world.rank).initial_seed())  # dropout, with no state to save
        for number, (inputs, targets) in enumerate(batch.micros, start=1):
            with accumulating(model, last=number == accumulate):
                with precise(world.device, precision):
                    outputs = model(inputs)
                total, sums = loss(outputs, targets)
                scaler.scale(total * (world.size / batch.count)).backward()
            run.meter.add(sums, len(targets))
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.scheduler.step()
        if run.average is not None:
            run.average.update_parameters(bare(model))
        progress.advance(batch.count)
        after_step(batch.count)
        if progress.step == max_steps:
            break
    if progress.samples >= len(loader):
        progress.finish_epoch()


@torch.inference_mode()
def evaluate(run, loader, loss, batch_size, precision):
    """{name: mean over every sample of the data set, each counted once}."""
    net, meter = run.judged.eval(), Meter(loss.names, loader.world)
    for inputs, targets in loader.once(batch_size):
        with precise(loader.world.device, precision):
            outputs = net(inputs)
        meter.add(loss(outputs, targets)[1], len(targets))
    return meter.means()
