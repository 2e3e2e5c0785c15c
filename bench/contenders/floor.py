"""The floor: forward, backward and optimizer over one batch that lies in memory, and nothing else.

python floor.py
torchrun --standalone --nproc_per_node=2 floor.py --sync=ddp

By default with Lockstep's own net, layout, allocator, optimizer and DDP options, as conf/ has them. --sync=none: the ranks begin
together and never speak again.
"""

import os
import sys
from pathlib import Path

import course
import torch
import torch.distributed as dist
import yaml
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))


def conf(name):
    """The numbers of a file of conf/."""
    return {key: value for key, value in yaml.safe_load((ROOT / "conf" / f"{name}.yaml").read_text()).items() if not key.startswith("_")}


def main():
    args = course.arguments(sync=["none", "ddp"], precision=["fp32", "bf16"], layout=["channels_last", "contiguous"], net=["lockstep", "tutorial"])
    from lockstep import datasets, models, world

    if args.net == "lockstep":
        world.keep_freed_memory()
    record, rank, size = course.Record(), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    layout = torch.channels_last if args.layout == "channels_last" else torch.contiguous_format
    whole = datasets.mnist(args.data, "MNIST", train=True)
    mine = slice(rank * args.batch, (rank + 1) * args.batch)
    images, labels = (whole.samples[mine] / 255).contiguous(memory_format=layout), whole.targets[mine].clone()
    net = course.ConvNet() if args.net == "tutorial" else models.convnet(shape=[1, 28, 28], classes=10)
    net = net.to(memory_format=layout)
    if size > 1:
        dist.init_process_group("gloo")
    if args.sync == "ddp":
        net = DistributedDataParallel(net, forward_sync_buffers=False, **conf("strategy/ddp"))
    optimizer = torch.optim.SGD(net.parameters(), **conf("optimizer/sgd"))
    if size > 1:
        dist.barrier()

    steps = args.samples // (args.batch * size)
    for _ in range(args.epochs):
        record.start()
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                outputs = net(images)
            cross_entropy(outputs, labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record.stepped()
        record.lap("training", steps * args.batch * size)
    record.write()


if __name__ == "__main__":
    main()
