"""Lockstep under measurement, and its floors in turns with it: the same steps and nothing else.

python src/train.py callbacks=[{_target_:lockstep_floors.Floors}] ...

A floor of one process is a bare loop. Several processes have two: DistributedDataParallel with Lockstep's options, and
replicas that never communicate. Lockstep and its floors take turns of TURN steps in the same processes: the machine's
speed changes by a fifth within seconds, so runs one after the other would not tell. All that belongs to an epoch is in
Lockstep's turns. A floor has Lockstep's model, optimizer, layout and precision. It trains on one batch in memory, each
turn from Lockstep's current weights: a model that has learned its one batch takes 5 % less time in bf16.
"""

import copy
from typing import Any

import torch
from measured import RECORD, Steps
from record import Record
from torch.nn.functional import cross_entropy

from lockstep.config.check import instantiate_as
from lockstep.loggers.base import EpochSummary
from lockstep.strategies.base import Strategy
from lockstep.strategies.ddp import DDP
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.training.exchange import Exchange
from lockstep.training.optimizers import can_fuse
from lockstep.training.run import Run

TURN = 20  # steps


def wait_for_device() -> None:
    """Until the GPU has done all that it was given. The end of a turn on a CPU is its end."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Floor:
    """A copy of the run's model in a strategy of its own, and one batch."""

    def __init__(self, strategy: Strategy, run: Run) -> None:
        self.strategy, self.world = strategy, run.world
        model = copy.deepcopy(run.model)
        strategy.setup(model, run.task.outputs, run.world, GradientSync(), run.config.trainer.precision)
        node = dict(run.config.optimizer)
        if "fused" in node and node["fused"] is None:
            node["fused"] = can_fuse(model)
        self.optimizer = instantiate_as(torch.optim.Optimizer, node, "optimizer", strategy.module.parameters())

    def copy_weights(self, model: torch.nn.Module) -> None:
        self.strategy.model.load_state_dict(model.state_dict())
        self.world.barrier()

    def steps(self, count: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        for _ in range(count):
            with self.strategy.autocast:
                outputs = self.strategy.module(inputs)
            cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


class Floors(Steps):
    """The last of the callbacks: Lockstep's turn ends when all that belongs to a step is done."""

    floors: dict[str, Floor] | None = None

    def begins(self, run: Run, exchange: Exchange) -> None:
        if self.floors is None:
            part = next(run.loaders.train.batches(run.progress)).parts[0]
            self.run, self.batch = run, (part.inputs, part.targets)
            self.floors = self.built()
            self.run_floors(Record(), TURN)  # warms up
        self.turns, self.turn_steps = Record(), 0
        self.turns.start()
        self.own[0](run, exchange)

    def ends(self, run: Run, exchange: Exchange) -> EpochSummary:
        summary = self.own[1](run, exchange)
        if self.turn_steps:
            self.end_turn()
        for what, laps in self.turns.laps.items():
            if laps:
                RECORD.laps.setdefault(what, []).append({key: sum(lap[key] for lap in laps) for key in laps[0]})
        RECORD.write()
        RECORD.start()
        return summary

    def on_step_end(self, run: Run) -> None:
        super().on_step_end(run)
        self.turn_steps += 1
        if self.turn_steps == TURN:
            self.end_turn()

    def built(self) -> dict[str, Floor]:
        strategy: Any = self.run.strategy
        strategies: dict[str, Strategy] = {"bare loop": Strategy()}
        if self.run.world.size > 1:
            strategies = {
                "bare DDP": DDP(strategy.bucket_cap_mb, strategy.find_unused_parameters),
                "no synchronisation": Strategy(),
            }
        return {name: Floor(strategy, self.run) for name, strategy in strategies.items()}

    def end_turn(self) -> None:
        """Lockstep's turn ends. The floors take as many steps."""
        wait_for_device()
        self.turns.lap("training", self.turn_steps * self.run.batch_size)
        self.run_floors(self.turns, self.turn_steps)
        self.run.world.barrier()
        self.turns.start()
        self.turn_steps = 0

    def run_floors(self, turns: Record, count: int) -> None:
        assert self.floors is not None
        for name, floor in self.floors.items():
            floor.copy_weights(self.run.model)
            wait_for_device()
            turns.start()
            floor.steps(count, *self.batch)
            wait_for_device()
            turns.lap(name, count * self.run.batch_size)
