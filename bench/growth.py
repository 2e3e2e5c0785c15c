"""What one unit of work costs as the work grows: nothing may grow faster than the work.

python bench/growth.py [--quick] [--rounds=3] [--only=batch,data,net,ranks]

Whole runs in fresh worlds, in turns, each rank on a core of its own; of each the cheapest round counts. Images are
random bytes: a step takes as long whatever they show. `grows` is the exponent of the whole cost: 1 is the work's own,
less than 1 a fixed cost shared by more work. The verdict compares a unit at the large end with the cheapest one before.
"""

import math
import statistics
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from costs import train_costs

LIMIT = 1.3  # how many times as much a unit may cost at the large end: noise, and caches that end
Costs = tuple[float, dict[str, float]]
"""(work, {cost: of the whole work})"""
Measure = Callable[[Any, bool, Path], Costs]
"""(point of the axis, quick, folder for files) -> costs"""


def mnist_files(folder: Path, samples: int = 60_000) -> list[str]:
    """The overrides that read MNIST's files with `samples` random images. They are written once."""
    import numpy as np

    place = folder / f"digits{samples}"
    raw, draw = place / "MNIST" / "raw", np.random.default_rng(0)
    if not place.exists():
        raw.mkdir(parents=True)
        for split, count in (("train", samples), ("t10k", 1000)):
            images = draw.integers(0, 256, 784 * count, dtype=np.uint8)
            labels = draw.integers(0, 10, count, dtype=np.uint8)
            (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
            (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())
    return ["dataset=mnist", f"data_dir={place}"]


def pinned_train_costs(config: Any) -> dict[str, Any]:
    """`train_costs` on a core of this rank's own, as far as there are enough: then torch uses one thread."""
    harness.pin_to_core()
    return train_costs(config)


def train(ranks: int, batch: int, steps: int | None, *overrides: str) -> list[dict[str, Any]]:
    """What the ranks of one epoch return, cut to `steps` of `batch` samples a rank."""
    some = [f"trainer.max_steps={steps}"] if steps else []
    size = [f"trainer.batch_size_per_rank={batch}", "trainer.epochs=1", "sync_bn=off"]
    return harness.in_ranks(ranks, pinned_train_costs, *harness.DDP, *size, *some, *overrides)


def step_milliseconds(rank: dict[str, Any]) -> dict[str, float]:
    return {"ms a step": 1e3 * min(rank["walls"]), "CPU ms a step": 1e3 * statistics.median(rank["cpus"])}


def batch(size: int, quick: bool, folder: Path) -> Costs:
    """A step of the convnet on MNIST's images, by samples in a batch."""
    steps = max(8, min(60, (2048 if quick else 16384) // size))
    return size, step_milliseconds(train(1, size, steps, *mnist_files(folder))[0])


def data(samples: int, quick: bool, folder: Path) -> Costs:
    """An epoch, by samples: of a linear layer, which mostly reads data, and of the convnet by its first steps."""
    files = mnist_files(folder, samples)
    (linear,) = train(1, 512, None, *files, "model=linear")
    (convnet,) = train(1, 128, 10 if quick else 60, *files)
    return samples, {
        "CPU s an epoch, linear": statistics.fmean(linear["cpus"]) * samples / 512,
        "CPU s an epoch, convnet": statistics.fmean(convnet["cpus"]) * samples / 128,
        "s to the first step": linear["first"],
        "MB resident": linear["resident"],
        "MB of its own": linear["own"],
    }


def net(name: str, quick: bool, folder: Path) -> Costs:
    """A step on 32x32 colour images, by the operations of its model for a batch."""
    size = 4 if quick else 32
    (rank,) = train(1, size, 5 if quick else 20, *harness.noise_images(4096, 64), f"model={name}")
    return size * harness.training_flops(f"model={name}", "dataset=cifar10") / 1e9, step_milliseconds(rank)


def ranks(size: int, quick: bool, folder: Path) -> Costs:
    """A step of the convnet, by ranks with 64 samples each: the CPU time and the memory of all of them."""
    world = train(size, 64, 15 if quick else 60, *mnist_files(folder))
    cpu = sum(statistics.median(rank["cpus"]) for rank in world)
    return size, {"CPU ms a step, all ranks": 1e3 * cpu, "MB of their own": sum(rank["own"] for rank in world)}


AXES: dict[str, tuple[Measure, str, Sequence[Any], Sequence[Any]]] = {
    # how a point is measured, the unit of work, the points, and those of --quick
    "batch": (batch, "samples", (16, 32, 64, 128, 256, 512, 1024), (16, 128, 512)),
    "data": (data, "samples", (60_000, 600_000), (6_000, 60_000)),
    "net": (net, "GFLOP", ("convnet", "resnet18"), ("convnet", "resnet18")),
    "ranks": (ranks, "ranks", (1, 2, 4, 8), (1, 2, 4)),
}


def growth(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(exponent of the whole cost, a unit at the large end over the cheapest smaller one).

    points: [(work, whole cost), ...], smallest first.
    """
    works, wholes = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    *smaller, last = (whole / work for work, whole in points)
    return statistics.linear_regression(works, wholes).slope, last / min(smaller)


def row(axis: str, cost: str, points: Sequence[tuple[float, float]]) -> list[str]:
    slope, worst = growth(points)
    first, last = (f"{whole:.4g} at {work:.4g} {AXES[axis][1]}" for work, whole in (points[0], points[-1]))
    verdict = "grows with the work" if worst <= LIMIT else f"FASTER than the work: {worst:.2f} > {LIMIT}"
    return [axis, cost, first, last, f"{slope:.2f}", f"{worst:.2f}", verdict]


def rows(axis: str, quick: bool, rounds: int, folder: Path) -> list[list[str]]:
    """A row for each cost of the axis."""
    measure, _, points, quick_points = AXES[axis]
    runs: Mapping[Any, Callable[[], Costs]] = {
        point: lambda point=point: measure(point, quick, folder) for point in (quick_points if quick else points)
    }
    found = list(harness.interleave(runs, rounds).values())
    costs = found[0][0][1]
    return [row(axis, cost, [(some[0][0], min(whole[cost] for _, whole in some)) for some in found]) for cost in costs]


def main() -> None:
    asked = harness.parse(harness.parser(__doc__, "growth", tuple(AXES), rounds=3))
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for axis in asked.only:
            lines += rows(axis, asked.quick, asked.rounds, Path(folder))
            print("\n".join(" | ".join(line) for line in lines if line[0] == axis), flush=True)
    head = ["axis", "cost", "small end", "large end", "grows", "a unit, large / cheapest", ""]
    harness.save(asked.out, "growth", harness.table(head, lines))


if __name__ == "__main__":
    main()
