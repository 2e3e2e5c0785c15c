"""Lockstep under measurement: callbacks that time steps and epochs, floors in turns with it, and what it trains on.

Every rank writes `RECORD`, what was measured, after an epoch's training and after an evaluation.
"""

import copy
import time
from typing import Any

import torch
from record import Record
from torch.nn.functional import cross_entropy

from lockstep.config.check import instantiate_as
from lockstep.data.source import Tensors
from lockstep.data.vision import TorchvisionImages
from lockstep.loggers.base import EpochSummary, Logger
from lockstep.strategies.base import Strategy
from lockstep.strategies.ddp import DDP
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.training import loop
from lockstep.training.callbacks import Callback
from lockstep.training.exchange import Exchange
from lockstep.training.optimizers import can_fuse
from lockstep.training.run import Run

RECORD = Record()
TURN = 20  # steps of Lockstep, and then of each floor


class Steps(Callback):
    """A lap of training reaches to the epoch's means over all ranks, which no callback sees."""

    def on_fit_start(self, run: Run, logger: Any) -> None:
        self.begin_epoch, self.end_epoch = loop.begin_epoch, loop.end_epoch
        loop.begin_epoch, loop.end_epoch = self.begins, self.ends
        logger.members.append(Evaluations(len(run.loaders.test.reader)))

    def begins(self, run: Run, exchange: Exchange) -> None:
        self.before = run.progress.samples
        RECORD.start()
        self.begin_epoch(run, exchange)

    def ends(self, run: Run, exchange: Exchange) -> EpochSummary:
        summary = self.end_epoch(run, exchange)
        RECORD.lap("training", (run.progress.samples or len(run.loaders.train)) - self.before)
        held = [weight for group in run.optimizer.param_groups for weight in group["params"]]
        held += [value for state in run.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in held]
        RECORD.extra["state"] = sum(tensor.nbytes for tensor in own)
        RECORD.write()
        RECORD.start()
        return summary

    def on_step_end(self, run: Run) -> None:
        RECORD.stepped()


class Evaluations(Logger):
    """The lap of each evaluation of so many samples reaches to the other loggers' work on it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def epoch(self, summary: EpochSummary) -> None:
        if "test" in summary.metrics:
            RECORD.lap("evaluation", self.samples)
            RECORD.extra |= {"evaluated": time.time(), **summary.metrics["test"]}
        RECORD.write()


def wait_for_device() -> None:
    """Until the GPU has done all that it was given. The end of a turn on a CPU is its end."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Floor:
    """The same steps and nothing else: a copy of the run's model in a strategy of its own, on one batch in memory."""

    def __init__(self, strategy: Strategy, run: Run) -> None:
        self.strategy, self.world = strategy, run.world
        part = next(run.loaders.train.batches(run.progress)).parts[0]
        self.inputs, self.targets = part.inputs, part.targets
        model, node = copy.deepcopy(run.model), dict(run.config.optimizer)
        strategy.setup(model, run.task.outputs, run.world, GradientSync(), run.config.trainer.precision)
        if "fused" in node and node["fused"] is None:
            node["fused"] = can_fuse(model)
        self.optimizer = instantiate_as(torch.optim.Optimizer, node, "optimizer", strategy.module.parameters())

    def copy_weights(self, model: torch.nn.Module) -> None:
        """A model that has learned its one batch would take 5 % less time in bf16."""
        self.strategy.model.load_state_dict(model.state_dict())
        self.world.barrier()
        wait_for_device()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with self.strategy.autocast:
                outputs = self.strategy.module(self.inputs)
            cross_entropy(outputs.flatten(0, -2), self.targets.flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        wait_for_device()


class Floors(Steps):
    """Lockstep takes turns with its floors in the same processes: a machine's speed changes by a fifth within seconds.

    The floor of one process is a bare loop. Several processes have two: DistributedDataParallel with Lockstep's
    options, and replicas that never communicate. All that belongs to an epoch is in Lockstep's turns. This is the last
    of the callbacks: a turn ends when all that belongs to a step is done.
    """

    def on_fit_start(self, run: Run, logger: Any) -> None:
        super().on_fit_start(run, logger)
        own: Any = run.strategy
        strategies: dict[str, Strategy] = {"bare loop": Strategy()}
        if run.world.size > 1:
            ddp = DDP(own.bucket_cap_mb, own.find_unused_parameters)
            strategies = {"bare DDP": ddp, "no synchronisation": Strategy()}
        self.floors = {name: Floor(strategy, run) for name, strategy in strategies.items()}
        for floor in self.floors.values():
            floor.train(TURN)  # warms up

    def begins(self, run: Run, exchange: Exchange) -> None:
        self.turns = Record()
        self.turns.start()
        self.begin_epoch(run, exchange)

    def on_step_end(self, run: Run) -> None:
        super().on_step_end(run)
        self.turns.stepped()
        if len(self.turns.steps) == TURN:
            self.end_turn(run)

    def ends(self, run: Run, exchange: Exchange) -> EpochSummary:
        summary = self.end_epoch(run, exchange)
        if self.turns.steps:
            self.end_turn(run)
        for what in ("training", *self.floors):
            laps = self.turns.laps[what]
            RECORD.laps.setdefault(what, []).append({key: sum(lap[key] for lap in laps) for key in laps[0]})
        RECORD.write()
        RECORD.start()
        return summary

    def end_turn(self, run: Run) -> None:
        """Lockstep's turn ends. The floors take as many steps, each from Lockstep's current weights."""
        wait_for_device()
        steps = len(self.turns.steps)
        self.turns.lap("training", steps * run.loaders.train.batch_size)
        for name, floor in self.floors.items():
            floor.copy_weights(run.model)
            self.turns.start()
            floor.train(steps)
            self.turns.lap(name, steps * run.loaders.train.batch_size)
        run.world.barrier()
        self.turns.steps.clear()
        self.turns.start()


def mnist(root: str, train: bool, samples: int) -> Tensors:
    """The first images of MNIST."""
    whole = TorchvisionImages(name="MNIST", root=root)._split(train=train)
    return Tensors(whole.inputs[:samples], whole.targets[:samples])


def noise(root: str, train: bool, samples: int) -> Tensors:
    """Random images in CIFAR-10's shape, with random classes."""
    generator = torch.Generator().manual_seed(int(train))
    images = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Tensors(images, torch.randint(0, 10, (samples,), generator=generator))
