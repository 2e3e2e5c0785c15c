"""The leanest script that trains: import torch, join, build the net, take one step.

python lean.py
torchrun --standalone --nproc_per_node=2 lean.py
"""

import os

import course
import torch
from torch.nn.functional import cross_entropy


def main():
    args, record, net = course.arguments(), course.Record(), course.ConvNet()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        torch.distributed.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    cross_entropy(net(torch.rand(args.batch, 1, 28, 28)), torch.randint(10, (args.batch,))).backward()
    optimizer.step()
    record.stepped()
    record.write()


if __name__ == "__main__":
    main()
