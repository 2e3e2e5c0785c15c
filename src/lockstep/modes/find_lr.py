"""mode=find_lr: a learning rate for a run, from a short training in which it rises (Smith 2017)."""

import logging
import shlex
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Annotated, Any

from annotated_types import Ge
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from lockstep import build
from lockstep.config.check import flatten
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import Positive, RunConfig
from lockstep.errors import ConfigError, show
from lockstep.failures.record import heartbeat
from lockstep.modes.base import Mode, Parts, join
from lockstep.training.schedules import Schedule

log = logging.getLogger(__name__)

RISING = "lockstep.modes.find_lr.rising"
START = 10  # steps whose losses tell where the loss begins, and how much batches differ
PART = 1 / 3
WINDOW = 5  # losses on each side of one that it is averaged with; an average of earlier losses alone would lag


class FindLr(Mode):
    """Trains with a rate that rises exponentially, until the loss diverges, and suggests one.

    Model, data, batches and optimizer are the run's own. All rates of an optimizer rise by the same factor. Nothing is
    evaluated, and no snapshot is written. The loss of each step goes to TensorBoard.

    min_lr, max_lr: optimizer.lr of the first and of the last step.
    steps: training steps from the first to the last; fewer are no curve.
    """

    name, needs_run = "find_lr", False

    def __init__(self, min_lr: Positive, max_lr: Positive, steps: Annotated[int, Ge(40)]) -> None:
        if min_lr >= max_lr:
            raise ConfigError(f"mode.max_lr={show(max_lr)} is below min_lr; type mode.max_lr={show(1000 * min_lr)}")
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps

    def work(self, config: RunConfig, record: ConfigRecord, parts: Parts) -> float:
        """Returns the suggestion. Raises ConfigError, on all ranks, if the loss never falls."""
        typed = config.optimizer.get("lr")
        if not typed:
            raise ConfigError("mode=find_lr scales the rates from optimizer.lr; type optimizer.lr=0.1")
        changes: dict[str, Any] = {"trainer.max_steps": self.steps, "trainer.epochs": self.steps}
        changes |= {"trainer.max_time": None, "trainer.pause_after": None, "trainer.ema": None, "watch.nan": "stop"}
        changes["scheduler"] = {"_target_": RISING, "first": self.min_lr / typed, "last": self.max_lr / typed}
        losses, lowest = list[float](), float("inf")
        with join(config, record, parts) as world:
            run = build.build_run(config.changed(changes), world, parts)
            if run.step.unit > 1:
                raise ConfigError("mode=find_lr needs steps that all ranks take together; type strategy=ddp")
            run.strategy.module.train()
            heartbeat.enter("mode", epoch=1)
            for batch in run.loaders.train.batches(run.progress):
                run.meter.clear()
                run.step(batch)
                run.progress.advance(batch)
                # Of this step over all ranks, before its update.
                sums = run.world.all_reduce_sum(run.meter.flush().clone())
                losses.append(run.meter.means(sums.tolist()).get("loss", float("nan")))
                begin, newest = fmean(losses[:START]), fmean(losses[-START:])
                lowest = min(lowest, newest)
                has_diverged = not newest <= begin + max(abs(begin), begin - lowest)
                if has_diverged or run.finished:
                    break
                run.end_epoch()
            rates = [typed * run.schedule.factor(step) for step in range(len(losses))]
            if world.is_rank_zero:
                with SummaryWriter(config.run_dir) as writer:
                    for step, (rate, loss) in enumerate(zip(rates, losses, strict=True), start=1):
                        writer.add_scalar("find_lr/loss", loss, step)
                        writer.add_scalar("find_lr/lr", rate, step)
            log.info("curve: tensorboard --logdir %s", shlex.quote(str(config.run_dir)))
            found = suggested(rates, losses)
            if found is None:
                raise ConfigError(
                    f"the loss does not fall by more than batches differ from optimizer.lr={rates[0]:.2g} to "
                    f"{rates[-1]:.2g} (it is {losses[0]:.4g}, and {losses[-1]:.4g} at the end); type mode=check to see "
                    f"whether the model learns at all, or mode.max_lr={show(100 * self.max_lr)}"
                )
            factor, known = found / typed, flatten(config.optimizer, "optimizer")
            rates_of = {key: rate for key, rate in known.items() if key.endswith(("_lr", ".lr"))}
            words = [f"{key}={float(f'{rate * factor:.2g}')}" for key, rate in rates_of.items()]
            log.info("type %s", shlex.join(words))
            if any("lr" in group for group in config.parameters.groups):
                log.info("and multiply each lr of parameters.groups by %.2g", factor)
            return found


def rising(optimizer: Optimizer, total_steps: int, first: float, last: float) -> Schedule:
    """All rates times a factor that rises exponentially, from `first` to `last` in the last step."""
    return Schedule(optimizer, lambda step: first * (last / first) ** (min(step, total_steps - 1) / (total_steps - 1)))


def suggested(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """A part of the rate with the lowest loss, None if it never falls by more than batches differ. The usual rule,
    the rate at which it falls fastest, is too low where it falls slowly: see docs/modes.md."""
    curve = smoothed(losses)
    lowest = curve.index(min(curve))
    if lowest < START or fmean(losses[:START]) - curve[lowest] <= 2 * stdev(losses[:START]):
        return None
    return max(rates[0], PART * rates[lowest])


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss as the mean of those around it, of equally many on both sides."""
    sides = [min(WINDOW, step, len(losses) - 1 - step) for step in range(len(losses))]
    return [fmean(losses[step - side : step + side + 1]) for step, side in enumerate(sides)]
