"""What one unit of work costs as the work grows: nothing may grow faster than the work.

Whole commands on random images, a thread for each rank, in turns; of each the cheapest round counts. `grows` is the
exponent of the whole cost: 1 is the work's own, less than 1 a fixed cost shared by more work. The verdict compares a
unit at the large end with the cheapest one before.
"""

import math
import time
from functools import partial
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import harness
import numpy as np
import torch
from harness import step_seconds
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config.check import instantiate
from support.configs import composed

LIMIT = 1.3  # how many times as much a unit may cost at the large end: noise, and caches that end
Costs = tuple[float, dict[str, float]]  # of a point of an axis: the work, and {cost: of the whole work}


def mnist_files(folder: Path, samples: int = 60_000) -> list[str]:
    """The overrides that read MNIST's files with `samples` random images. They are written once."""
    place = folder / f"digits{samples}"
    raw, draw = place / "MNIST" / "raw", np.random.default_rng(0)
    if not place.exists():
        raw.mkdir(parents=True)
        for split, count in (("train", samples), ("t10k", 1000)):
            for what, magic, values, *shape in (("images-idx3", 2051, 256, 28, 28), ("labels-idx1", 2049, 10)):
                header = np.array([magic, count, *shape], ">i4").tobytes()
                drawn = draw.integers(0, values, (count, *shape), dtype=np.uint8).tobytes()
                (raw / f"{split}-{what}-ubyte").write_bytes(header + drawn)
    return ["dataset=mnist", f"data_dir={place}"]


def train(ranks: int, batch: int, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """The records of the ranks of one epoch, of at most `steps` of `batch` samples a rank, with a thread each."""
    size = [f"trainer.batch_size_per_rank={batch}", "trainer.epochs=1", f"trainer.max_steps={steps}"]
    return harness.trained(ranks, *size, "sync_bn=off", "backend.threads=1", *overrides)


def step_milliseconds(rank: dict[str, Any]) -> dict[str, float]:
    return {"ms a step": 1e3 * min(step_seconds(rank, 0)), "CPU ms a step": 1e3 * median(step_seconds(rank, 1))}


def batch(size: int, quick: bool, folder: Path) -> Costs:
    """A step of the convnet on MNIST's images, by samples in a batch."""
    steps = max(8, min(60, (2048 if quick else 16384) // size))
    return size, step_milliseconds(train(1, size, steps, *mnist_files(folder))[0])


def data(samples: int, quick: bool, folder: Path) -> Costs:
    """An epoch of a linear layer, which mostly reads data, by samples."""
    files, began = mnist_files(folder, samples), time.time()
    (linear,) = train(1, 512, samples, *files, "model=linear")
    cpu = fmean(step_seconds(linear, 1)) * samples / 512
    first = linear["first_step"] - began
    return samples, {"CPU s an epoch": cpu, "s to the first step": first, "MB of its own": linear["own"]}


def net(name: str, quick: bool, folder: Path) -> Costs:
    """A step on 32x32 colour images, by the operations of its model for a batch, as torch counts them."""
    size = 4 if quick else 32
    (rank,) = train(1, size, 5 if quick else 20, *harness.images("noise", 4096, 64), f"model={name}")
    with torch.device("meta"), FlopCounterMode(display=False) as counter:  # nothing is computed
        model = instantiate(composed(f"model={name}", "dataset=cifar10").model)
        model(torch.empty(size, 3, 32, 32)).sum().backward()
    return counter.get_total_flops() / 1e9, step_milliseconds(rank)


def ranks(size: int, quick: bool, folder: Path) -> Costs:
    """A step of the convnet, by ranks with 64 samples each: the CPU time and the memory of all of them."""
    world = train(size, 64, 15 if quick else 60, *mnist_files(folder))
    cpu = sum(median(step_seconds(rank, 1)) for rank in world)
    return size, {"CPU ms a step, all ranks": 1e3 * cpu, "MB of their own": sum(rank["own"] for rank in world)}


AXES: dict[str, Any] = {
    # how a point is measured, the unit of work, the points, and those of --quick
    "batch": (batch, "samples", (16, 32, 64, 128, 256, 512, 1024), (16, 128, 512)),
    "data": (data, "samples", (60_000, 600_000), (6_000, 60_000)),
    "net": (net, "GFLOP", ("convnet", "resnet18"), ("convnet", "resnet18")),
    "ranks": (ranks, "ranks", (1, 2, 4, 8), (1, 2, 4)),
}


def table(axis: str, folder: Path, rounds: int, quick: bool) -> str:
    measure, unit, *points = AXES[axis]
    runs = {point: partial(measure, point, quick, folder) for point in points[quick]}
    found = list(harness.interleave(runs, rounds).values())
    works, rows = [turns[0][0] for turns in found], []
    for cost in found[0][0][1]:
        wholes = [min(one[cost] for _, one in turns) for turns in found]
        slope = linear_regression(list(map(math.log, works)), list(map(math.log, wholes))).slope
        *smaller, last = (whole / work for work, whole in zip(works, wholes, strict=True))
        worst = last / min(smaller)
        ends = [f"{wholes[place]:.4g} at {works[place]:.4g} {unit}" for place in (0, -1)]
        verdict = "grows with the work" if worst <= LIMIT else f"FASTER than the work: {worst:.2f} > {LIMIT}"
        rows.append([axis, cost, *ends, f"{slope:.2f}", f"{worst:.2f}", verdict])
    head = ["axis", "cost", "small end", "large end", "grows", "a unit, large / cheapest", ""]
    return harness.table(head, rows)


if __name__ == "__main__":
    harness.run_parts(__doc__, "growth", 3, **{axis: partial(table, axis) for axis in AXES})
