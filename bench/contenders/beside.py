"""Lockstep under the clock as in ours.py, and beside every epoch its floor: the same steps, forward, backward and optimizer, and nothing else.

python src/train.py loop._target_=beside.train ...

One process has a bare loop beside it. Of several, the floors are DistributedDataParallel with Lockstep's options, and ranks that never
speak. All take their turns in the same processes, a second or two each: on a machine whose speed wanders by a fifth, nothing else would tell.
A floor's net, optimizer, layout and precision are Lockstep's; it trains over one batch that lies in memory.
"""

import copy
from pathlib import Path

import ours
import torch.distributed as dist
import yaml
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lockstep import loop
from lockstep.strategy import bare

WARMUP = 10  # steps
floors = {}


def train(run, loader, after_step):
    if not floors:
        floors.update(made(run, loader))
        for floor in floors.values():
            floor(WARMUP)
    figures = ours.train(run, loader, after_step)
    steps, turn = run.recipe.steps(len(loader))[0], run.progress.epoch % len(floors)
    for name in [*floors][turn:] + [*floors][:turn]:
        loader.world.barrier()
        ours.record.start()
        floors[name](steps)
        ours.record.lap(name, len(loader))
    return figures


def made(run, loader):
    """{name of a floor: a function of the number of steps}"""
    world = loader.world
    (_, images, labels), *_ = next(loader.epoch(0, run.recipe.batch_size, run.recipe.cut)).parts
    options = yaml.safe_load((Path(loop.__file__).parents[2] / "conf" / "strategy" / "ddp.yaml").read_text())

    def floor(wrap):
        net = wrap(copy.deepcopy(bare(run.model)))
        optimizer = type(run.optimizer)(net.parameters(), **run.optimizer.defaults)

        def steps(count):
            for _ in range(count):
                with loop.precise(world.device, run.recipe.precision):
                    outputs = net(images)
                cross_entropy(outputs, labels).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return steps

    def ddp(net):
        return DistributedDataParallel(net, forward_sync_buffers=False, **{key: value for key, value in options.items() if not key.startswith("_")})

    if world.size == 1:
        return {"bare loop": floor(lambda net: net)}
    return {"bare DDP": floor(ddp), "no synchronisation": floor(lambda net: net)}
