"""Lockstep under the clock, and beside it its floor: the same steps, forward, backward and optimizer, and nothing else.

python src/train.py loop._target_=beside.train ...

One process has a bare loop beside it. Of several, the floors are DistributedDataParallel with Lockstep's options, and ranks that never
speak. They take turns of a few steps in the same processes: on a machine whose speed wanders by a fifth within seconds, nothing else would
tell. All that belongs to an epoch is in Lockstep's turns. A floor's net, optimizer, layout and precision are Lockstep's; it trains over one
batch that lies in memory, each time from the weights that Lockstep has come to: a net that has come to know its batch by heart takes
5 % less time in bf16.
"""

import copy
from pathlib import Path

import course
import ours
import yaml
from torch.nn.functional import cross_entropy

from lockstep import loop
from lockstep.strategy import bare, ddp

TURN = 20  # steps
floors = {}


def train(run, loader, after_step):
    if not floors:
        floors.update(made(run, loader))
        for floor in floors.values():
            floor.steps(TURN)  # warms up
    turns, since = course.Record(), 0

    def others():
        turns.lap("training", since * run.recipe.batch_size)
        for name, floor in floors.items():
            floor.net.load_state_dict(bare(run.model).state_dict())
            loader.world.barrier()
            turns.start()
            floor.steps(since)
            turns.lap(name, since * run.recipe.batch_size)
        loader.world.barrier()
        turns.start()

    def after(samples):
        nonlocal since
        since += 1
        if since == TURN:
            others()
            since = 0

    turns.start()
    figures = loop.train(run, loader, [ours.record.stepped, *after_step, after])
    others()
    for what, laps in turns.laps.items():
        if laps:
            ours.record.laps.setdefault(what, []).append({key: sum(lap[key] for lap in laps) for key in laps[0]})
    return figures


def made(run, loader):
    """{name: Floor}"""
    world, alone = loader.world, Floor(run, loader, lambda net: net)
    if world.size == 1:
        return {"bare loop": alone}
    conf = yaml.safe_load((Path(loop.__file__).parents[2] / "conf" / "strategy" / "ddp.yaml").read_text())
    options = {key: value for key, value in conf.items() if not key.startswith("_")}
    return {"bare DDP": Floor(run, loader, lambda net: ddp(net, world, **options)), "no synchronisation": alone}


class Floor:
    """A copy of the run's net, made by `wrap` into what is trained, and its first batch."""

    def __init__(self, run, loader, wrap):
        (_, self.images, self.labels), *_ = next(loader.epoch(0, run.recipe.batch_size, run.recipe.cut)).parts
        self.net = copy.deepcopy(bare(run.model))
        self.model = wrap(self.net)
        self.optimizer = type(run.optimizer)(self.net.parameters(), **run.optimizer.defaults)
        self.device, self.precision = loader.world.device, run.recipe.precision

    def steps(self, count):
        for _ in range(count):
            with loop.precise(self.device, self.precision):
                outputs = self.model(self.images)
            cross_entropy(outputs, self.labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
