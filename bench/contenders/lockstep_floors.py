"""Lockstep under measurement, and its floors in turns with it: the same steps and nothing else.

python src/train.py strategy._target_=lockstep_floors.DDPAndFloors '+strategy.optimizer=${optimizer}' ...

A floor of one process is a bare loop. Several processes have two: DistributedDataParallel with Lockstep's options, and
replicas that never communicate. Lockstep and its floors take turns of TURN steps in the same processes: the machine's
speed changes by a fifth within seconds, so runs one after the other would not tell. All that belongs to an epoch is in
Lockstep's turns. A floor has Lockstep's model, optimizer, layout and precision. It trains on one batch in memory, each
turn from Lockstep's current weights: a model that has learned its one batch takes 5 % less time in bf16.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from measured import RECORD, MeasuredDDP
from record import Record
from torch.nn.functional import cross_entropy

from lockstep.distributed.world import World
from lockstep.strategies.base import Strategy
from lockstep.strategies.ddp import DDP
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.training.loop import train_epoch
from lockstep.training.setup import autocast
from lockstep.training.watchers import Watcher

TURN = 20  # steps


def wait_for_device() -> None:
    """Until the GPU has done all that it was given. The end of a turn on a CPU is its end."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Floor:
    """A copy of the run's model in a strategy of its own, and one batch."""

    def __init__(
        self, strategy: Strategy, model: torch.nn.Module, world: World, optimizer: Any, precision: str
    ) -> None:
        self.strategy, self.world, self.precision = strategy, world, precision
        strategy.setup(copy.deepcopy(model), world, GradientSync())
        self.optimizer = optimizer(strategy.module.parameters())

    def copy_weights(self, model: torch.nn.Module) -> None:
        self.strategy.model.load_state_dict(model.state_dict())
        self.world.barrier()

    def steps(self, count: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        for _ in range(count):
            with autocast(self.world.device, self.precision):
                outputs = self.strategy.module(inputs)
            cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


class Turns(Watcher):
    """The last of the watchers: Lockstep's turn ends when all that belongs to a step is done."""

    def __init__(self, strategy: "DDPAndFloors") -> None:
        self.strategy = strategy

    def after_step(self, samples: int) -> None:
        self.strategy.turn_steps += 1
        if self.strategy.turn_steps == TURN:
            self.strategy.end_turn()


class DDPAndFloors(MeasuredDDP):
    """optimizer, precision: the run's own, which a strategy does not know: they come by interpolation in the config."""

    def __init__(self, optimizer: Callable[..., Any], precision: str, **options: Any) -> None:
        super().__init__(**options)
        self.optimizer, self.precision = optimizer, precision
        self.floors: dict[str, Floor] = {}

    def own_epoch(self) -> Callable[..., int]:
        def in_turns(state: Any, stream: Iterator[Any], seed: int, timer: Any, watchers: Sequence[Watcher]) -> int:
            batch = next(stream)
            part = batch.parts[0]
            self.batch, self.batch_size = (part.inputs, part.targets), state.settings.batch_size
            if not self.floors:
                self.build_floors()
                self.run_floors(Record(), TURN)  # warms up
            self.turns, self.turn_steps = Record(), 0
            self.turns.start()
            called = [*self.step_watchers(), *watchers, Turns(self)]
            return train_epoch(state, chain([batch], stream), seed, timer, called)

        return in_turns

    def epoch_metrics(self) -> dict[str, float]:
        if self.turn_steps:
            self.end_turn()
        for what, laps in self.turns.laps.items():
            if laps:
                RECORD.laps.setdefault(what, []).append({key: sum(lap[key] for lap in laps) for key in laps[0]})
        RECORD.write()
        RECORD.start()
        return {}

    def build_floors(self) -> None:
        names: dict[str, Strategy] = {"bare loop": Strategy()}
        if self.world.size > 1:
            names = {"bare DDP": DDP(**self.options), "no synchronisation": Strategy()}
        for name, strategy in names.items():
            self.floors[name] = Floor(strategy, self.model, self.world, self.optimizer, self.precision)

    def end_turn(self) -> None:
        """Lockstep's turn ends. The floors take as many steps."""
        wait_for_device()
        self.turns.lap("training", self.turn_steps * self.batch_size)
        self.run_floors(self.turns, self.turn_steps)
        self.world.barrier()
        self.turns.start()
        self.turn_steps = 0

    def run_floors(self, turns: Record, count: int) -> None:
        for name, floor in self.floors.items():
            floor.copy_weights(self.model)
            wait_for_device()
            turns.start()
            floor.steps(count, *self.batch)
            wait_for_device()
            turns.lap(name, count * self.batch_size)
