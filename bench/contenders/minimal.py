"""The shortest script that trains: import torch, join the ranks, build the net, take one step."""

import torch
import workload
from record import Record
from torch.nn.functional import cross_entropy

args, record = workload.arguments(), Record()
net = workload.wrap(workload.ConvNet())
optimizer = torch.optim.SGD(net.parameters(), 1e-4)
cross_entropy(net(torch.rand(args.batch, 1, 28, 28)), torch.randint(10, (args.batch,))).backward()
optimizer.step()
record.stepped()
record.write()
