"""mode=find_lr: a learning rate for a run, from a short training in which it rises (Smith 2017)."""

import logging
import math
import shlex
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from lockstep.config.schema import Node, Positive, RunConfig
from lockstep.errors import ConfigError, TrainingDiverged
from lockstep.failures import reporter
from lockstep.modes.base import Mode, begin, join
from lockstep.text import show

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.preflight import Parts
    from lockstep.strategies.base import JobSpec

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
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps

    def validate(self, job: "JobSpec") -> None:
        if self.min_lr >= self.max_lr:
            what = f"mode.max_lr={show(self.max_lr)} must be above mode.min_lr={show(self.min_lr)}"
            raise ConfigError(f"{what}; type mode.max_lr={show(1000 * self.min_lr)}")

    def work(self, config: RunConfig, record: "ConfigRecord", parts: "Parts") -> float:
        """Returns the suggestion. Raises ConfigError, on all ranks, if the loss never falls."""
        from lockstep import build
        from lockstep.distributed.run_folder import hold_run_folder
        from lockstep.loggers.base import Loggers
        from lockstep.loggers.tensorboard import TensorBoardLogger
        from lockstep.training.lr_range import RateFinder, suggested

        with join(config, parts) as (world, logs), hold_run_folder(config.run_dir, world):
            begin(config, record, world, logs)
            typed = config.optimizer.get("lr")
            if not typed:
                raise ConfigError("mode=find_lr scales the rates from optimizer.lr; type optimizer.lr=0.1")
            changes: dict[str, Any] = {"trainer.max_steps": self.steps, "trainer.epochs": self.steps}
            changes |= {"trainer.max_time": None, "trainer.pause_after": None, "trainer.ema": None, "watch.nan": "stop"}
            changes["scheduler"] = {"_target_": RISING, "first": self.min_lr / typed, "last": self.max_lr / typed}
            run = build.build_run(config.changed(changes), world, parts)
            if run.step.unit > 1:
                raise ConfigError("mode=find_lr needs steps that all ranks take together; type strategy=ddp")
            config, finder = run.config, RateFinder()
            run.strategy.module.train()
            reporter.epoch_starts(1)
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
            found = suggested(rates, losses)
            with Loggers([TensorBoardLogger(config.run_dir, 0)] if world.is_rank_zero else []) as loggers:
                for step, (rate, loss) in enumerate(zip(rates, losses, strict=True), start=1):
                    loggers.log({"find_lr/loss": loss, "find_lr/lr": rate}, step)
            if found is None and not math.isfinite(losses[-1]):
                raise TrainingDiverged(f"the loss is {losses[-1]} at step {len(losses)}", "type mode.min_lr=<smaller>")
            if found is None:
                raise ConfigError(
                    f"the loss does not fall by more than batches differ from optimizer.lr={rates[0]:.2g} to "
                    f"{rates[-1]:.2g}, see its curve in {config.run_dir}; type mode=check to see whether the model "
                    f"learns at all, or mode.max_lr={show(100 * self.max_lr)} mode.steps={2 * self.steps}"
                )
            log.info("curve: tensorboard --logdir %s", shlex.quote(str(config.run_dir)))
            log.info("type %s", words_of(config, found / typed))
            return found


def words_of(config: RunConfig, factor: float) -> str:
    """What to type for rates that are `factor` times those of the config."""

    def scaled(node: Node) -> Node:
        rates = {key: value for key, value in node.items() if key == "lr" or key.endswith("_lr")}
        return node | {key: float(f"{value * factor:.2g}") for key, value in rates.items()}

    optimizer, groups = config.optimizer, config.parameters.groups
    words = [f"optimizer.{key}={show(value)}" for key, value in scaled(optimizer).items() if value != optimizer[key]]
    if any("lr" in group for group in groups):
        words.append(f"parameters.groups={show([scaled(group) for group in groups])}")
    return shlex.join(words)
