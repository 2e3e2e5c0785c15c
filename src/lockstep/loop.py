"""Train and evaluate. Nothing here knows how many processes there are."""

from dataclasses import dataclass

import torch

from lockstep.data import draw
from lockstep.meter import Meter
from lockstep.strategy import accumulating, bare


class Stopped(Exception):
    """The run was asked to stop early; its snapshot is written and it can be resumed."""


@dataclass
class Progress:
    """How far a run is: whole epochs done, samples of the current epoch used, optimizer steps done."""

    epoch: int = 0
    samples: int = 0
    step: int = 0

    def advance(self, samples):
        self.samples, self.step = self.samples + samples, self.step + 1

    def finish_epoch(self):
        self.epoch, self.samples = self.epoch + 1, 0


def precise(device, precision):
    """The autocast context of `precision`: fp32 and fp64 compute in the parameters' own type."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, types.get(precision), enabled=precision in types)


def train(model, loader, loss, optimizer, scheduler, scaler, world, progress, meter,
          *, batch_size, accumulate, clip_norm, precision, max_steps, after_step):  # fmt: skip
    """The rest of one epoch: from progress.samples to its end, or to max_steps.

    The gradient of a step is the gradient of the mean over the global batch: sums over samples, divided by the true
    global count, times the world size that gradient averaging divides by. Means of ranks' means would be wrong
    wherever shares are unequal. `after_step()` is called when a step is done; it may raise Stopped.
    """
    model.train()
    for batch in loader.epoch(progress.epoch, batch_size, accumulate, skip=progress.samples):
        torch.manual_seed(draw(loader.seed, progress.step, world.rank).initial_seed())  # dropout, without a state to save
        for number, (inputs, targets) in enumerate(batch.micros, start=1):
            with accumulating(model, last=number == accumulate):
                with precise(world.device, precision):
                    outputs = model(inputs)
                total, sums = loss(outputs, targets)
                scaler.scale(total * (world.size / batch.count)).backward()
            meter.add(sums, len(targets))
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        progress.advance(batch.count)
        after_step()
        if progress.step == max_steps:
            break
    if progress.samples >= len(loader):
        progress.finish_epoch()


@torch.inference_mode()
def evaluate(model, loader, loss, world, names, batch_size, precision):
    """{name: mean over every sample of the data set, each counted once}."""
    net = bare(model).eval()
    meter = Meter(names, world)
    for inputs, targets in loader.once(batch_size):
        with precise(world.device, precision):
            outputs = net(inputs)
        meter.add(loss(outputs, targets)[1], len(targets))
    return meter.means()
