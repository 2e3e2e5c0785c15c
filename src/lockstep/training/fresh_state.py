"""The state of a run before its first step."""

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lockstep.strategies.base import Strategy
from lockstep.tasks.base import Task
from lockstep.training.ema import ExponentialMovingAverage
from lockstep.training.meter import Meter
from lockstep.training.nan_policy import NanPolicy
from lockstep.training.schedulers import require_schedule
from lockstep.training.setup import grad_scaler
from lockstep.training.state import TrainSettings, TrainState


def constant_rate(optimizer: Optimizer) -> LRScheduler:
    """The learning rate stays as it is."""
    return LambdaLR(optimizer, lambda step: 1.0)


def fresh_state(
    settings: TrainSettings,
    task: Task,
    strategy: Strategy,
    optimizer: Optimizer,
    schedule: Callable[[Optimizer], LRScheduler] = constant_rate,
    ema: float | None = None,
    nan: str = "stop",
) -> TrainState:
    """What trains the model that `strategy` was set up with.

    optimizer: of the parameters of `strategy.module`. schedule: makes the scheduler, which is stepped after each step.
    ema: decay of an average of the weights. nan: as watch.nan.
    """
    # Before the scheduler, which changes the learning rate.
    initial = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    meter = Meter(task, strategy.world)
    return TrainState(
        settings=settings,
        task=task,
        strategy=strategy,
        optimizer=optimizer,
        initial_hyperparameters=initial,
        scheduler=require_schedule(schedule(optimizer), "scheduler"),
        scaler=grad_scaler(strategy.world, settings.precision),
        meter=meter,
        nan=NanPolicy(nan, strategy, meter, checks_gradients=settings.precision != "fp16"),
        ema=None if ema is None else ExponentialMovingAverage(strategy.model, ema),
    )
