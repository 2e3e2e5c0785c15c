"""What one unit of work costs as the work grows: nothing may grow faster than the work.

python bench/growth.py [--quick] [--rounds=3] [--only=batch,data,net,ranks,tags,snapshot] [--out=outputs/growth]

Whole runs in fresh worlds, in turns, each rank on a core of its own; of each the cheapest round counts. Images are
random bytes: a step takes as long whatever they show. `grows` is the exponent of the whole cost: 1 is the work's own,
less than 1 a fixed cost shared by more work. The verdict compares a unit at the large end with the cheapest one before.
"""

import itertools
import math
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
from rank_costs import pinned_train_costs, snapshot_costs

LIMIT = 1.3  # how many times as much a unit may cost at the large end: noise, and caches that end
MEASURED = "strategy._target_=measured.MeasuredDDP"
Costs = tuple[float, dict[str, float]]
"""(work, {cost: of the whole work})"""
Point = tuple[str, Callable[[], Costs]]
Row = dict[str, Any]
"""{"axis", "point", "work", "cost", "whole"}"""


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


def step_milliseconds(rank: dict[str, Any]) -> dict[str, float]:
    return {"ms a step": 1e3 * min(rank["walls"]), "CPU ms a step": 1e3 * statistics.median(rank["cpus"])}


def batch(quick: bool, folder: Path) -> Iterator[Point]:
    """A step of the convnet on MNIST's images, by samples in a batch."""

    def measure(size: int) -> Costs:
        steps = max(8, min(60, (2048 if quick else 16384) // size))
        overrides = [
            *mnist_files(folder),
            MEASURED,
            "trainer.epochs=1",
            f"trainer.batch_size={size}",
            f"trainer.max_steps={steps}",
        ]
        (rank,) = harness.in_ranks(1, pinned_train_costs, *overrides)
        return size, step_milliseconds(rank)

    for size in (16, 128, 512) if quick else (16, 32, 64, 128, 256, 512, 1024):
        yield f"{size}", lambda size=size: measure(size)


def data(quick: bool, folder: Path) -> Iterator[Point]:
    """An epoch, by samples: of a linear layer, which mostly reads data, and of the convnet by its first steps."""

    def measure(samples: int) -> Costs:
        files = [*mnist_files(folder, samples), MEASURED, "trainer.epochs=1"]
        (linear,) = harness.in_ranks(1, pinned_train_costs, *files, "model=linear", "trainer.batch_size=512")
        (convnet,) = harness.in_ranks(
            1, pinned_train_costs, *files, "trainer.batch_size=128", f"trainer.max_steps={10 if quick else 60}"
        )
        costs = {
            "CPU s an epoch, linear": statistics.fmean(linear["cpus"]) * samples / 512,
            "CPU s an epoch, convnet": statistics.fmean(convnet["cpus"]) * samples / 128,
            "s to the first step": linear["first"],
            "MB resident": linear["resident"],
            "MB of its own": linear["own"],
        }
        return samples, costs

    for samples in (6_000, 60_000) if quick else (60_000, 600_000):
        yield f"{samples}", lambda samples=samples: measure(samples)


def net(quick: bool, folder: Path) -> Iterator[Point]:
    """A step on 32x32 colour images, by the operations of its model for a batch."""
    from gpu import training_flops

    size = 4 if quick else 32
    images = ["dataset=cifar10", "dataset.prepare=null", "~dataset.train.data_dir", "~dataset.test.data_dir"]
    images += [f"dataset.{part}._target_=measured.noise" for part in ("train", "test")]
    images += ["+dataset.train.samples=4096", "+dataset.test.samples=64", MEASURED, "trainer.epochs=1"]

    def measure(name: str) -> Costs:
        steps = [f"trainer.batch_size={size}", f"trainer.max_steps={5 if quick else 20}"]
        (rank,) = harness.in_ranks(1, pinned_train_costs, *images, f"model={name}", *steps)
        work = size * training_flops(f"model={name}", "dataset=cifar10") / 1e9
        return work, step_milliseconds(rank)

    for name in ("convnet", "resnet18"):
        yield name, lambda name=name: measure(name)


def ranks(quick: bool, folder: Path) -> Iterator[Point]:
    """A step of the convnet, by ranks with 64 samples each: the CPU time and the memory of all of them."""

    def measure(size: int) -> Costs:
        steps = [
            MEASURED,
            "sync_bn=off",
            "trainer.epochs=1",
            "trainer.batch_size_per_rank=64",
            f"trainer.max_steps={15 if quick else 60}",
        ]
        world = harness.in_ranks(size, pinned_train_costs, *mnist_files(folder), *steps)
        cpu = sum(statistics.median(rank["cpus"]) for rank in world)
        own = sum(rank["own"] for rank in world)
        return size, {"CPU ms a step, all ranks": 1e3 * cpu, "MB of their own": own}

    for size in (1, 2, 4) if quick else (1, 2, 4, 8):
        yield f"{size}", lambda size=size: measure(size)


def tags(quick: bool, folder: Path) -> Iterator[Point]:
    """A call of the TensorBoard logger, by tags in it."""

    def measure(count: int) -> Costs:
        from lockstep.loggers.tensorboard import TensorBoardLogger

        place = Path(tempfile.mkdtemp(dir=folder))
        logger, values = TensorBoardLogger(place), {f"figures/number_{tag}": 0.5 for tag in range(count)}
        calls = max(1, (2_000 if quick else 20_000) // count)
        began = time.perf_counter()
        for step in range(calls):
            logger.log_metrics(values, step)
        logger.flush()
        seconds = time.perf_counter() - began
        logger.close()
        (events,) = place.iterdir()
        return count, {"ms a call, flushed": 1e3 * seconds / calls, "bytes on disk": events.stat().st_size / calls}

    for count in (1, 10, 100, 1000):
        yield f"{count}", lambda count=count: measure(count)


def snapshot(quick: bool, folder: Path) -> Iterator[Point]:
    """A snapshot of an mlp under AdamW, by MB on disk: what it costs the training thread, and the writer's."""

    def measure(width: int) -> Costs:
        run = ["model=mlp", f"model.width={width}", "model.depth=3", "optimizer=adamw", "trainer.max_steps=2"]
        (rank,) = harness.in_ranks(1, snapshot_costs, *run, "snapshot.keep_last=1")
        return rank["MB"], {"CPU ms of training": 1e3 * rank["copying"], "ms of writing": 1e3 * rank["writing"]}

    for width in (192, 640) if quick else (192, 640, 2048, 4096):
        yield f"mlp of width {width}", lambda width=width: measure(width)


AXES = {"batch": batch, "data": data, "net": net, "ranks": ranks, "tags": tags, "snapshot": snapshot}
UNITS = {"batch": "samples", "data": "samples", "net": "GFLOP", "ranks": "ranks", "tags": "tags", "snapshot": "MB"}


def growth(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(exponent of the whole cost, a unit at the large end over the cheapest smaller one, over the smallest one).

    points: [(work, whole cost), ...], smallest first."""
    works, wholes = zip(*points, strict=True)
    slope = statistics.linear_regression(
        [math.log(work) for work in works], [math.log(whole) for whole in wholes]
    ).slope
    *smaller, last = (whole / work for work, whole in points)
    return slope, last / min(smaller), last / smaller[0]


def by_cost(rows: Sequence[Row]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """{(axis, cost): [(work, whole), ...]}"""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault((row["axis"], row["cost"]), []).append((row["work"], row["whole"]))
    return found


def table(rows: Sequence[Row]) -> str:
    """A line for each cost of each axis."""
    lines = []
    for (axis, cost), points in by_cost(rows).items():
        slope, worst, ends = growth(points)
        first, last = (f"{whole:.4g} at {work:.4g} {UNITS[axis]}" for work, whole in (points[0], points[-1]))
        verdict = "grows with the work" if worst <= LIMIT else f"FASTER than the work: {worst:.2f} > {LIMIT}"
        lines.append([axis, cost, first, last, f"{slope:.2f}", f"{ends:.2f}", f"{worst:.2f}", verdict])
    head = ["axis", "cost", "small end", "large end", "grows", "a unit, large / small", "large / cheapest", ""]
    return harness.table(head, lines)


def panels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each cost of a unit over the work, as a multiple of the smallest work's."""
    found: dict[str, dict[str, Any]] = {}
    for (axis, cost), points in by_cost(rows).items():
        labels = {
            "xlabel": UNITS[axis],
            "xscale": "log",
            "ylim": (0, 1.5),
            "title": axis,
            "ylabel": "cost of a unit, small end = 1",
        }
        panel = found.setdefault(axis, {"lines": {}, **labels})
        first = points[0][1] / points[0][0]
        panel["lines"][cost] = [(work, whole / work / first) for work, whole in points]
    return list(found.values())


def main() -> None:
    asked = harness.parse(harness.parser(__doc__, "growth", tuple(AXES), rounds=3))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for axis in asked.only:
            found = harness.interleave(dict(AXES[axis](asked.quick, Path(folder))), asked.rounds)
            costs = list(next(iter(found.values()))[0][1])
            for cost, (point, rounds) in itertools.product(costs, found.items()):
                whole = min(costs[cost] for _, costs in rounds)
                rows.append({"axis": axis, "point": point, "work": rounds[0][0], "cost": cost, "whole": whole})
            print(table([row for row in rows if row["axis"] == axis]), flush=True)
    harness.save(asked.out, "growth", table(rows), panels(rows))


if __name__ == "__main__":
    main()
