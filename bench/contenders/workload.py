"""The course that all contenders run: the tutorial's net, the arguments, the first images of a set, and the clock.

A contender reads the clock at the end of its first step and of its epochs, never in between. What a rank measured of
itself is one line of JSON: in the file $RACE_RECORD.<rank> where that is set, else printed by rank 0.
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

from torch import nn


class ConvNet(nn.Module):
    """The tutorial's net, its layers in the tutorial's order. (N, 1, 28, 28) -> (N, 10) logits."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=1, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(kernel_size=2, stride=2)
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(16, 32, kernel_size=5, stride=1, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(kernel_size=2, stride=2)
        )
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

    def forward(self, x):
        out = self.layer2(self.layer1(x))
        return self.fc(out.reshape(out.size(0), -1))


def arguments(**more):
    """The arguments of every contender; `more`: {name: choices} of its own, the first choice the default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=os.environ.get("LOCKSTEP_DATA", "data"), help="the folder that holds MNIST/raw")
    parser.add_argument("--samples", type=int, default=60000, help="to train on, over all ranks")
    parser.add_argument("--test-samples", type=int, default=10000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="samples a rank and step")
    for name, choices in more.items():
        parser.add_argument(f"--{name}", type=type(choices[0]), choices=choices, default=choices[0])
    return parser.parse_args()


def mnist(args, train, transform):
    """torchvision's MNIST, cut to its first images."""
    from torchvision.datasets import MNIST

    whole, count = MNIST(args.data, train=train, transform=transform, download=True), args.samples if train else args.test_samples
    whole.data, whole.targets = whole.data[:count], whole.targets[:count]
    return whole


class Record:
    """What a rank measures of itself. seconds are wall time, cpu is that of the rank and of its workers that have ended."""

    def __init__(self):
        self.first_step, self.laps = None, {"training": [], "evaluation": []}

    def stepped(self, *_):
        """An optimizer step has ended; the first one's moment is kept."""
        if self.first_step is None:
            self.first_step = time.time()

    def start(self):
        self.began, self.cpu = time.perf_counter(), _cpu_seconds()

    def lap(self, what, samples):
        """`what` (training, evaluation, a floor) of `samples`, over all ranks, has taken all the time since `start` or the lap before."""
        began, cpu = self.began, self.cpu
        self.start()
        self.laps.setdefault(what, []).append({"seconds": self.began - began, "cpu": self.cpu - cpu, "samples": samples})

    def write(self, accuracy=None, rank=None):
        rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        line = json.dumps({"first_step": self.first_step, **self.laps, "accuracy": accuracy, **_memory()})
        if "RACE_RECORD" in os.environ:
            Path(f"{os.environ['RACE_RECORD']}.{rank}").write_text(line + "\n")
        elif rank == 0:
            print(line)


def _cpu_seconds():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _memory():
    """MB: the peak of this process's resident memory, and at present its private part and its share (PSS); nothing without /proc."""
    if not Path("/proc/self/smaps_rollup").exists():
        return {}
    told = {}
    for name in ("status", "smaps_rollup"):
        for line in Path("/proc/self", name).read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                told[key] = int(value.split()[0]) * 1024 / 1e6
    # Not ru_maxrss: that one remembers the process which called exec.
    return {"rss": told["VmHWM"], "private": told["Private_Clean"] + told["Private_Dirty"], "pss": told["Pss"]}
