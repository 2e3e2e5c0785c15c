"""mode=find_lr: a learning rate for a run, from a short training in which it rises (Smith 2017)."""

import logging
import shlex
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from lockstep.config.schema import Positive, RunConfig
from lockstep.errors import ConfigError
from lockstep.failures.record import heartbeat
from lockstep.modes.base import Mode, join
from lockstep.text import show

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.preflight import Parts

log = logging.getLogger(__name__)

RISING = "lockstep.training.lr_range.rising"


class FindLr(Mode):
    """Trains with a rate that rises exponentially, until the loss diverges, and suggests one.

    Model, data, batches and optimizer are the run's own. All rates of an optimizer rise by the same factor. Nothing is
    evaluated, and no snapshot is written. The loss of each step goes to TensorBoard.

    min_lr: optimizer.lr of the first step.
    max_lr: optimizer.lr of the last step.
    steps: training steps from the first to the last; fewer are no curve.
    """

    name, needs_run = "find_lr", False

    def __init__(self, min_lr: Positive, max_lr: Positive, steps: Annotated[int, Ge(40)]) -> None:
        if min_lr >= max_lr:
            raise ConfigError(f"mode.max_lr={show(max_lr)} is below min_lr; type mode.max_lr={show(1000 * min_lr)}")
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps

    def work(self, config: RunConfig, record: "ConfigRecord", parts: "Parts") -> float:
        """Returns the suggestion. Raises ConfigError, on all ranks, if the loss never falls."""
        from torch.utils.tensorboard import SummaryWriter

        from lockstep import build
        from lockstep.training.lr_range import RateFinder, suggested

        typed = config.optimizer.get("lr")
        if not typed:
            raise ConfigError("mode=find_lr scales the rates from optimizer.lr; type optimizer.lr=0.1")
        changes: dict[str, Any] = {"trainer.max_steps": self.steps, "trainer.epochs": self.steps}
        changes |= {"trainer.max_time": None, "trainer.pause_after": None, "trainer.ema": None, "watch.nan": "stop"}
        changes["scheduler"] = {"_target_": RISING, "first": self.min_lr / typed, "last": self.max_lr / typed}
        with join(config, record, parts) as world:
            run, finder = build.build_run(config.changed(changes), world, parts), RateFinder()
            if run.step.unit > 1:
                raise ConfigError("mode=find_lr needs steps that all ranks take together; type strategy=ddp")
            run.strategy.module.train()
            heartbeat.enter("mode", epoch=1)
            for batch in run.loaders.train.batches(run.progress):
                if run.progress.samples == 0:
                    run.meter.clear()
                    run.step.draws.begin_epoch(run.progress.step)
                run.step(batch)
                run.progress.advance(batch)
                finder.on_step_end(run)
                if run.finished:
                    break
                run.end_epoch()
            losses, ratio = finder.losses, self.max_lr / self.min_lr
            rates = [self.min_lr * ratio ** (step / (self.steps - 1)) for step in range(len(losses))]
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
            optimizer, factor = config.optimizer, found / typed
            known = optimizer | {f"others.{key}": value for key, value in optimizer.get("others", {}).items()}
            rates_of = {key: rate for key, rate in known.items() if key.endswith(("_lr", ".lr")) or key == "lr"}
            words = [f"optimizer.{key}={float(f'{rate * factor:.2g}')}" for key, rate in rates_of.items()]
            log.info("type %s", shlex.join(words))
            if any("lr" in group for group in config.parameters.groups):
                log.info("and multiply each lr of parameters.groups by %.2g", factor)
            return found
