"""Train and evaluate. Nothing here knows how many processes there are."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from lockstep.average import Average
from lockstep.data import place_seed
from lockstep.meter import Meter
from lockstep.strategy import agree_on_buffers, average_drift, clip, divisor, examine, learn, part


@dataclass(frozen=True)
class Recipe:
    """What a run does, the same from its first step to its last. batch_size counts the samples of all ranks;
    cut: which parts of a global batch are this rank's, see lockstep.data."""

    loss: object
    batch_size: int
    epochs: int
    max_steps: int | None
    cut: Callable
    clip_norm: float | None
    precision: str
    eval_batch_size: int
    eval_every: int
    patience: int | None

    def steps(self, samples):
        """(optimizer steps in an epoch of `samples`, optimizer steps in the run)."""
        epoch = -(-samples // self.batch_size)
        return epoch, min(self.epochs * epoch, self.max_steps or self.epochs * epoch)


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


@dataclass
class Run:
    """A recipe, and everything that changes as it is followed: what a snapshot holds."""

    recipe: Recipe
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    meter: Meter
    average: Average | None
    progress: Progress = field(default_factory=Progress)

    def judged(self):
        """Around an evaluation or an export: the model holds the weights that count, their average where there is one."""
        return nullcontext() if self.average is None else self.average.in_place()

    @property
    def finished(self):
        recipe, progress = self.recipe, self.progress
        return progress.epoch >= recipe.epochs or progress.step == recipe.max_steps or progress.stale == recipe.patience

    @property
    def evaluation_due(self):
        return self.finished or self.progress.epoch % self.recipe.eval_every == 0

    def judge(self, value, lower_is_better):
        """Note an evaluation, the same number on every rank; True if it is the best so far. NaN never is.

        In mid-epoch, where max_steps ends a run, nothing is noted: the same run without that end would not have looked.
        """
        progress = self.progress
        if progress.samples or math.isnan(value):
            return False
        if progress.best is None or (value < progress.best if lower_is_better else value > progress.best):
            progress.best, progress.stale = value, 0
        else:
            progress.stale += 1
        return progress.stale == 0


def settle(seed, deterministic):
    """Seed the initial weights; with `deterministic`, take only algorithms that give the same bits every time."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # even to say no again imports the compiler
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic  # a step's shapes stay the same, so trying convolutions once pays


def place(net, world, precision, channels_last, compile):
    """The net on its device, in the layout and type it computes in; "auto" is channels_last for nets with convolutions.

    compile: True, or a mode of torch.compile: "reduce-overhead" records CUDA graphs, "max-autotune" tries kernels first.
    On a CPU channels_last makes the convolution net 1.4 times as fast: max-pooling hates the other layout.
    """
    convolves = any(isinstance(module, torch.nn.Conv2d) for module in net.modules())
    net = net.to(world.device, torch.float64 if precision == "fp64" else torch.float32)
    if convolves if channels_last == "auto" else channels_last:
        net = net.to(memory_format=torch.channels_last)
    if compile:
        net.compile(mode=None if compile is True else compile)
    return net


def scaler(world, precision):
    """Loss scaling for fp16 (Micikevicius et al. 2018); a pass-through for the other precisions."""
    return torch.amp.GradScaler(world.device.type, enabled=precision == "fp16")


def precise(device, precision):
    """The autocast context of `precision`: fp32 and fp64 compute in the parameters' own type."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, types.get(precision), enabled=precision in types)


def train(run, loader, after_step):
    """The rest of one epoch: from run.progress.samples to its end, or to max_steps.

    Each of `after_step` is called with the step's global count; it may raise to stop. Returns {tag: figure}, what there
    is to show of the training beside run.meter: nothing here.
    """
    recipe, progress = run.recipe, run.progress
    run.model.train()
    if progress.samples == 0:
        run.meter.clear()
    for batch in loader.epoch(progress.epoch, recipe.batch_size, recipe.cut, skip=progress.samples):
        backward(run, loader, batch, progress.step)
        update(run)
        progress.samples, progress.step = progress.samples + batch.count, progress.step + 1
        for call in after_step:
            call(batch.count)
        if progress.step == recipe.max_steps:
            break
    if progress.samples >= len(loader):
        progress.epoch, progress.samples = progress.epoch + 1, 0
    return {}


def backward(run, loader, batch, step):
    """Leave this rank's gradient of `step` in .grad.

    The gradient of a step is the gradient of the mean over the global batch: sums over samples, divided by the true
    global count, times what gradient averaging divides by. Means of ranks' means would be wrong
    wherever shares are unequal.
    """
    model, autocast = run.model, precise(loader.world.device, run.recipe.precision)
    loss = partial(weighed, run, divisor(model, loader.world) / batch.count)
    for number, (place, inputs, targets) in enumerate(batch.parts, start=1):
        reseed(place_seed(loader.seed, step, place))
        with part(model, last=number == len(batch.parts)):
            learn(model, inputs, targets, loss, autocast)


def reseed(seed):
    """Seed what dropout draws from. torch.manual_seed does too, at 0.5 ms a call where torch could use a GPU and does not."""
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)


def weighed(run, weight, outputs, targets):
    """The loss as it is minimised: summed, times `weight`, scaled for fp16. What it counts goes to the run's meter."""
    total, sums = run.recipe.loss(outputs, targets)
    run.meter.add(sums, len(targets))
    return run.scaler.scale(total * weight)


def update(run):
    """One optimizer step from the gradients at hand."""
    if run.recipe.clip_norm is not None:
        run.scaler.unscale_(run.optimizer)
        clip(run.model, run.recipe.clip_norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    run.scheduler.step()
    if run.average is not None:
        run.average.update()


def agree(run):
    """The same weights and the same optimizer on every rank, before they are judged or saved."""
    average_drift(run.model, _drifting(run))


def _drifting(run):
    """What ranks that step on their own gradients hold apart."""
    yield from run.model.parameters()
    for state in run.optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value) and value.is_floating_point())
    if run.average is not None:
        yield from run.average.values.values()


def evaluate(run, loader):
    """{name: mean over every sample of the data set, each counted once}, by the net that is to be judged."""
    agree(run)
    model, recipe = run.model.eval(), run.recipe
    meter, autocast = Meter(recipe.loss.names, loader.world), precise(loader.world.device, recipe.precision)

    def count(outputs, targets):
        meter.add(recipe.loss(outputs, targets)[1], len(targets))

    agree_on_buffers(model, loader.world)
    with run.judged(), torch.no_grad():  # inference_mode would make FSDP's buffers, if these are its first, useless for training
        for inputs, targets in loader.once(recipe.eval_batch_size):
            examine(model, inputs, targets, count, autocast)
    return meter.means()
