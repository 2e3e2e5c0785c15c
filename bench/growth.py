"""What one unit of work costs as the work grows: nothing may grow faster than the work.

python bench/growth.py [--quick] [--rounds=3] [--only=batch,data,net,ranks,tags,snapshot] [--out=outputs/growth]

Whole runs of src/train.py's own work() in fresh worlds, in turns, so that whatever else the machine does falls on all
alike; of each the cheapest round counts. Images are random bytes in MNIST's files and in CIFAR-10's shape: a step takes
as long whatever they show. Writes a table in markdown and csv, and a plot.

A line's verdict compares the cost of a unit at the large end with the cheapest unit at any smaller size. `grows` is the
exponent of the whole cost: 1 is the work's own, less than 1 a fixed cost shared by more work.
"""

import argparse
import csv
import itertools
import math
import os
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "bench")]

LIMIT = 1.3  # a unit may cost so many times as much at the large end: the noise of a shared machine, and caches that end


def write_digits(folder, samples):
    """MNIST's four files, of random bytes: `samples` to train on and 1000 to test. Returns `folder`."""
    import numpy as np

    raw, draw = Path(folder) / "MNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for split, count in (("train", samples), ("t10k", 1000)):
        with open(raw / f"{split}-images-idx3-ubyte", "wb") as file:
            file.write(struct.pack(">4i", 2051, count, 28, 28))
            for some in range(0, count, 10_000):
                file.write(draw.bytes(784 * min(10_000, count - some)))
        labels = draw.integers(0, 10, count, dtype=np.uint8).tobytes()
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels)
    return folder


def colours(data_dir, train):
    """Random images in CIFAR-10's shape: what conf calls `dataset.train` and `dataset.test` here."""
    import torch

    from lockstep.datasets import InMemory

    count = 4096 if train else 64
    generator = torch.Generator().manual_seed(int(train))
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return InMemory(images, torch.randint(0, 10, (count,), generator=generator))


def life(cfg):
    """One rank's life, on a core of its own as far as they go, so with one thread: what its run cost it.

    first: seconds from the start of work() to the end of the first step; wall: of its fastest step; cpu: of a middling step,
    on the process's own clock; mean: of all steps, on that clock, and whatever happens between them; resident, own: MB when the
    training is over, with mapped files and without; copying, writing: (seconds, seconds of CPU) of each snapshot, on the
    training's thread and on the writer's.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    import train
    from lockstep import loop, snapshot

    step, evaluate, walls, processors, memory, copying, writing = loop.update, loop.evaluate, [], [], {}, [], []

    def update(run):
        step(run)
        walls.append(time.perf_counter())
        processors.append(time.process_time())

    def weighed(run, loader):
        memory.update(held())
        return evaluate(run, loader)

    def timed(function, seconds):
        def timed(*arguments):
            began, worked = time.perf_counter(), time.thread_time()
            function(*arguments)
            seconds.append((time.perf_counter() - began, time.thread_time() - worked))

        return timed

    loop.update, loop.evaluate = update, weighed
    snapshot.Keeper.save = timed(snapshot.Keeper.save, copying)
    snapshot.Keeper._write = timed(snapshot.Keeper._write, writing)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    began = time.perf_counter()
    train.work(cfg)
    steps, busy = ([late - early for early, late in itertools.pairwise(times[2:])] for times in (walls, processors))
    return {
        "first": walls[0] - began, "wall": min(steps, default=math.nan), "cpu": statistics.median(busy or [math.nan]),
        "mean": statistics.fmean(busy or [math.nan]), **memory, "copying": copying, "writing": writing,
    }  # fmt: skip


def held():
    """MB that this process has mapped and touched, and those of them that no file holds."""
    sizes = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {"resident": int(sizes["Rss:"]) / 1e3, "own": int(sizes["Anonymous:"]) / 1e3}


def lived(size, *overrides):
    """What the ranks of a fresh world of `size` measure of one run."""
    from conftest import in_world
    from test_configs import composed

    with tempfile.TemporaryDirectory() as folder:
        return in_world(size, life, composed(f"run_dir={folder}", "trainer.epochs=1", *overrides), limit=1800)


# Each axis yields (a point's name, its measurement), a measurement being a function without arguments -> (work, {cost: its whole}).


def batch(quick, folder):
    """A step of the convnet on MNIST's images, by samples in a batch."""

    def measured(size):
        (rank,) = lived(1, *digits(folder), f"trainer.batch_size={size}", f"trainer.max_steps={max(8, min(60, (2048 if quick else 16384) // size))}")
        return size, {"ms a step": 1e3 * rank["wall"], "CPU ms a step": 1e3 * rank["cpu"]}

    for size in (16, 128, 512) if quick else (16, 32, 64, 128, 256, 512, 1024):
        yield f"{size}", lambda size=size: measured(size)


def data(quick, folder):
    """An epoch, by samples in the data set: of a linear layer, which is little but reading data, and the convnet's, by its first steps."""

    def measured(samples):
        (linear,) = lived(1, *digits(folder, samples), "model=linear", "trainer.batch_size=512")
        (convnet,) = lived(1, *digits(folder, samples), "trainer.batch_size=128", f"trainer.max_steps={10 if quick else 60}")
        costs = {"CPU s an epoch, linear": linear["mean"] * samples / 512, "CPU s an epoch, convnet": convnet["mean"] * samples / 128}
        return samples, costs | {"s to the first step": linear["first"], "MB resident": linear["resident"], "MB of its own": linear["own"]}

    for samples in (6_000, 60_000) if quick else (60_000, 600_000):
        yield f"{samples}", lambda samples=samples: measured(samples)


def net(quick, folder):
    """A step on 32x32 colour images, by what its net computes for a batch."""
    size = 4 if quick else 32
    images = ["dataset=cifar10", "dataset.prepare=null", "dataset.train._target_=growth.colours", "dataset.test._target_=growth.colours"]

    def measured(name):
        (rank,) = lived(1, *images, f"model={name}", f"trainer.batch_size={size}", f"trainer.max_steps={5 if quick else 20}")
        return size * flops(f"model={name}", "dataset=cifar10") / 1e9, {"ms a step": 1e3 * rank["wall"], "CPU ms a step": 1e3 * rank["cpu"]}

    for name in ("convnet", "resnet18"):
        yield name, lambda name=name: measured(name)


def ranks(quick, folder):
    """A step of the convnet, by ranks, each with 64 samples: the CPU time of all of them, whoever waits for a core."""

    def measured(size):
        world = lived(size, *digits(folder), "trainer.batch_size_per_rank=64", f"trainer.max_steps={15 if quick else 60}")
        return size, {"CPU ms a step, all ranks": 1e3 * sum(rank["cpu"] for rank in world), "MB of their own": sum(rank["own"] for rank in world)}

    for size in (1, 2, 4) if quick else (1, 2, 4, 8):
        yield f"{size}", lambda size=size: measured(size)


def tags(quick, folder):
    """One board's posts, by tags in each."""

    def measured(count):
        from lockstep import board, loop

        panel = board.Board(tempfile.mkdtemp(dir=folder), SimpleNamespace(progress=loop.Progress()), "", 1)
        values, posts = {f"figures/number_{tag}": 0.5 for tag in range(count)}, max(1, (2_000 if quick else 20_000) // count)
        began = time.perf_counter()
        for _ in range(posts):
            panel.run.progress.step += 1
            panel.post(values)
        panel.flush()
        seconds = time.perf_counter() - began
        panel.writer.close()
        (events,) = panel.folder.iterdir()
        return count, {"ms a post, flushed": 1e3 * seconds / posts, "bytes on disk": events.stat().st_size / posts}

    for count in (1, 10, 100, 1000):
        yield f"{count}", lambda count=count: measured(count)


def snapshots(quick, folder):
    """A snapshot of an mlp under AdamW, by MB on disk: what it costs the training's thread, and the writer's."""

    def measured(width):
        run = ["model=mlp", f"model.width={width}", "model.depth=3", "optimizer=adamw", "trainer.max_steps=24", "trainer.save_every=8steps"]
        (rank,) = lived(1, *run, "trainer.keep=1")
        weights = 64 * width + 2 * width**2 + 3 * width + 10 * width + 10
        # Not the first save: what memory costs that no process has touched before is the machine's affair.
        copying = min(cpu for _, cpu in rank["copying"])
        return 3 * 4 * weights / 1e6, {"CPU ms of training": 1e3 * copying, "ms of writing": 1e3 * min(rank["writing"])[0]}

    for width in (192, 640) if quick else (192, 640, 2048, 4096):
        yield f"mlp of width {width}", lambda width=width: measured(width)


AXES = {"batch": batch, "data": data, "net": net, "ranks": ranks, "tags": tags, "snapshot": snapshots}
UNITS = {"batch": "samples", "data": "samples", "net": "GFLOP", "ranks": "ranks", "tags": "tags", "snapshot": "MB"}


def digits(folder, samples=60_000):
    """The overrides that read MNIST's files, of random bytes, of so many samples; they are written once."""
    place = Path(folder) / f"digits{samples}"
    if not place.exists():
        write_digits(place, samples)
    return ["dataset=mnist", f"data_dir={place}"]


def flops(*overrides):
    """Floating point operations of one sample's forward and backward pass, by torch's own count."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import train
    from test_configs import composed

    cfg = composed(*overrides)
    with FlopCounterMode(display=False) as counter:
        train.make(cfg.model)(torch.randn(2, *cfg.dataset.shape)).sum().backward()
    return counter.get_total_flops() / 2


def growth(points):
    """(exponent of the whole cost, a unit at the large end over the cheapest smaller one, over the smallest) of [(work, whole cost), ...]."""
    works, wholes = zip(*points, strict=True)
    slope = statistics.linear_regression([math.log(work) for work in works], [math.log(whole) for whole in wholes]).slope
    *smaller, last = (whole / work for work, whole in points)
    return slope, last / min(smaller), last / smaller[0]


def table(rows):
    """A line for each cost of each axis; rows: {axis, point, work, cost, whole}, the cheapest round of each."""
    lines = ["| axis | cost | small end | large end | grows | a unit, large / small | large / cheapest | |", "|---" * 8 + "|"]
    for (axis, cost), some in itertools.groupby(sorted(rows, key=lambda row: list(AXES).index(row["axis"])), lambda row: (row["axis"], row["cost"])):
        points = [(row["work"], row["whole"]) for row in some]
        slope, worst, ends = growth(points)
        first, last = (f"{whole:.4g} at {work:.4g} {UNITS[axis]}" for work, whole in (points[0], points[-1]))
        verdict = "grows with the work" if worst <= LIMIT else f"FASTER than the work: {worst:.2f} > {LIMIT}"
        lines.append(f"| {axis} | {cost} | {first} | {last} | {slope:.2f} | {ends:.2f} | {worst:.2f} | {verdict} |")
    return "\n".join(lines) + "\n"


def plot(rows, path):
    """Each cost of a unit over the work, the small end's as 1. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    axes = [axis for axis in AXES if any(row["axis"] == axis for row in rows)]
    figure = Figure(figsize=(12, 4 * -(-len(axes) // 3)), layout="constrained")
    for axis, panel in zip(axes, figure.subplots(-(-len(axes) // 3), 3, squeeze=False).flat, strict=False):
        for cost in dict.fromkeys(row["cost"] for row in rows if row["axis"] == axis):
            points = [(row["work"], row["whole"] / row["work"]) for row in rows if (row["axis"], row["cost"]) == (axis, cost)]
            panel.plot([work for work, _ in points], [unit / points[0][1] for _, unit in points], "o-", label=cost)
        panel.set(xlabel=UNITS[axis], xscale="log", ylim=(0, 1.5), title=axis, ylabel="cost of a unit, small end = 1")
        panel.minorticks_off()
        panel.axhline(1, color="grey", linewidth=0.5)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="fewer and smaller points, one round: to see that it runs")
    options.add_argument("--rounds", type=int, help="3, or 1 with --quick")
    options.add_argument("--only", default=",".join(AXES), help="axes, with commas between")
    options.add_argument("--out", type=Path, default=ROOT / "outputs" / "growth")
    asked = options.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    asked.out.mkdir(parents=True, exist_ok=True)

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for axis in asked.only.split(","):
            points = [(name, measure, []) for name, measure in AXES[axis](asked.quick, folder)]
            for _ in range(asked.rounds or (1 if asked.quick else 3)):
                for _, measure, found in points:
                    found.append(measure())
            for cost in points[0][2][0][1]:
                for name, _, found in points:
                    rows.append({"axis": axis, "point": name, "work": found[0][0], "cost": cost, "whole": min(costs[cost] for _, costs in found)})
            print(table([row for row in rows if row["axis"] == axis]), flush=True)
    (asked.out / "growth.md").write_text(table(rows))
    with open(asked.out / "growth.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"table: {asked.out / 'growth.md'}, {asked.out / 'growth.csv'}")
    try:
        plot(rows, asked.out / "growth.png")
        print(f"plot:  {asked.out / 'growth.png'}")
    except ImportError:
        print(f"no plot without matplotlib; type {sys.executable} -m pip install -r requirements-bench.txt", file=sys.stderr)


if __name__ == "__main__":
    main()
