"""Fits bench/step_time.py's constants to this machine, checks its predictions on 2, 4 and 8 ranks, and says where each strategy stops paying.

python bench/scaling.py [--quick] [--rounds=5] [--docs] [--out=outputs/scaling]

Three checks. Collectives on cables (bench/cable.py) of 1 ms and 100 Mbit/s, where the network and not two cores is what is
measured. Whole steps of src/train.py's own work() on those cables, of a net that sleeps where others compute: as many hosts
as ranks. And steps of a real net on loopback, whose ranks share this machine's cores. The cables want root.

Writes scaling.md and scaling.png; --docs also puts the tables into docs/scaling.md and the plot beside it.
"""

import argparse
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "bench")]

import cable  # noqa: E402
import step_time  # noqa: E402
from step_time import Machine, Wire, Work  # noqa: E402

LATENCY, BANDWIDTH = 1e-3, 100e6 / 8  # of a cable
SIZES = (4_000, 40_000, 400_000, 4_000_000)  # bytes
EVERY = 4  # steps between two averages of the local SGD that is measured
SLEEPER = ["dataset=random", "dataset.features=256", "dataset.samples=4096", "model=mlp", "model._target_=scaling.sleeper", "model.width=256",
           "model.depth=8", "~model.dropout", "+model.seconds=0.03", "trainer.batch_size_per_rank=8", 
           "trainer.log_every=1000", "objective=test/loss"]  # fmt: skip
REAL = ["model=mlp", "model.width=1024", "model.depth=2", "trainer.batch_size_per_rank=128", "trainer.log_every=1000", "gradient_sync=all_reduce"]
BUCKETS = "strategy.bucket_cap_mb=0.5"
STEPS = {  # what is measured of it: the overrides, and the formula, see `predicted`
    "DDP, all-reduce": ([BUCKETS, "gradient_sync=all_reduce"], step_time.ddp),
    "DDP, bf16": ([BUCKETS, "gradient_sync=bf16"], lambda *case: step_time.ddp(*case, shrink=2)),
    "ring, waited for": ([BUCKETS, "gradient_sync=ring"], lambda *case: step_time.one_by_one(*case, way=step_time.ring)),
    "parameter server": ([BUCKETS, "gradient_sync=parameter_server"], lambda *case: step_time.one_by_one(*case, way=step_time.server)),
    f"local SGD, every {EVERY}": (
        [BUCKETS, "gradient_sync=local_sgd", f"gradient_sync.every={EVERY}"],
        lambda *case: step_time.local_sgd(*case, every=EVERY),
    ),
    "FSDP": (["strategy=fsdp"], step_time.fsdp),
    "pipeline": (["strategy=pipeline"], step_time.pipeline),
}

# --- what is measured, on the ranks ---


class Nap(torch.autograd.Function):
    """A third of its time forward, the rest backward: a device that computes while this process sleeps."""

    @staticmethod
    def forward(ctx, rows, seconds):
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None


class Sleepy(nn.Linear):
    """A layer that takes `seconds` a sample, times what the net's last forward pass drew."""

    mood = 1.0

    def __init__(self, inputs, outputs, seconds):
        super().__init__(inputs, outputs)
        self.seconds = seconds

    def forward(self, rows):
        rows = super().forward(rows)
        return Nap.apply(rows, self.seconds * len(rows) * Sleepy.mood) if torch.is_grad_enabled() and not rows.is_meta else rows


class Sleeper(nn.Sequential):
    spread = 0.0

    def forward(self, rows):
        Sleepy.mood = random.lognormvariate(0, self.spread)
        return super().forward(rows)


def sleeper(shape, classes, width, depth, seconds, spread=0.0):
    """What conf calls `model` here: `depth` layers that take `seconds` a sample together."""
    widths = [math.prod(shape), *[width] * (depth - 1), classes]
    net = Sleeper(*(Sleepy(inputs, outputs, seconds / depth) for inputs, outputs in itertools.pairwise(widths)))
    net.spread = spread
    random.seed(int(os.environ["RANK"]))
    return net


def on_host(hosts, function, *args):
    """function(*args) on this rank's of `hosts`, or, where there are none, on a core of this machine."""
    rank = int(os.environ["RANK"])
    if hosts:
        cable.enter(hosts[rank])
        os.environ.update(MASTER_ADDR="10.77.0.10", GLOO_SOCKET_IFNAME="eth0")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return function(*args)


def tree_sum(vector, rank, size):
    """Sum `vector` over `size` ranks, a power of two, in place: halves are exchanged, added and exchanged again."""
    from lockstep.gradient_sync import P2POp, _exchange, irecv, isend

    part, halved, distance = vector, [], size // 2
    while distance:
        low, high = part.tensor_split(2)
        mine, theirs = (high, low) if rank & distance else (low, high)
        arrived = torch.empty_like(mine)
        _exchange(P2POp(irecv, arrived, rank ^ distance), P2POp(isend, theirs, rank ^ distance))
        halved.append((mine.add_(arrived), theirs, rank ^ distance))
        part, distance = mine, distance // 2
    for mine, theirs, peer in reversed(halved):
        _exchange(P2POp(irecv, theirs, peer), P2POp(isend, mine, peer))


def collectives(sizes, rounds):
    """{(collective, bytes): seconds, the fastest round's}."""
    from lockstep import gradient_sync, world

    with world.join("gloo", 120) as ranks:
        place = ranks.rank, ranks.size
        ways = {
            "all-reduce": dist.all_reduce,
            "ring_sum": lambda vector: gradient_sync.ring_sum(vector, *place),
            "tree_sum": lambda vector: tree_sum(vector, *place),
            "server_sum": lambda vector: gradient_sync.server_sum(vector, *place),
            "all-gather": lambda vector: dist.all_gather_into_tensor(vector, vector.chunk(ranks.size)[ranks.rank].clone()),
            "reduce-scatter": lambda vector: dist.reduce_scatter_tensor(vector.chunk(ranks.size)[ranks.rank].clone(), vector),
        }
        found = {}
        for (name, way), size in itertools.product(ways.items(), sizes):
            seconds = []
            for _ in range(rounds + 1):  # the first connects those who speak
                vector = torch.zeros(size // 4)
                ranks.barrier()
                began = time.perf_counter()
                way(vector)
                seconds.append(time.perf_counter() - began)
            found[name, size] = min(seconds[1:])
        return found


def stepping(cfg):
    """(the seconds of each step after the third, the CPU seconds of a middling one) of a run."""
    import train
    from lockstep import loop

    update, walls, busy = loop.update, [], []

    def timed(run):
        update(run)
        walls.append(time.perf_counter())
        busy.append(time.process_time())

    loop.update, sys.stdout = timed, open(os.devnull, "w")  # noqa: SIM115
    train.work(cfg)
    steps, processor = ([late - early for early, late in itertools.pairwise(times[2:])] for times in (walls, busy))
    return steps, statistics.median(processor)


def measured(size, function, *args, wired=False):
    """What the ranks of a world of `size` answer, on cables or on this machine's cores."""
    from conftest import in_world

    with cable.cables(size, LATENCY, BANDWIDTH) if wired else nullcontext() as hosts:
        return in_world(size, on_host, hosts, function, *args, limit=900)


def stepped(size, steps, *overrides, wired=False):
    """(mean seconds of a step, middling CPU seconds of one, all steps' seconds) of the rank that ends last."""
    from test_configs import composed

    with tempfile.TemporaryDirectory() as folder:
        ranks = measured(
            size, stepping, composed(f"run_dir={folder}", "trainer.epochs=1000", f"trainer.max_steps={steps + 3}", *overrides), wired=wired
        )
    walls, busy = max(ranks, key=lambda rank: sum(rank[0]))
    return statistics.fmean(walls), busy, walls


def slower(worlds):
    """{(collective, bytes): seconds of the slowest rank}."""
    return {key: max(rank[key] for rank in worlds) for key in worlds[0]}


# --- constants ---


def fitted(times, ranks, cores=None):
    """The Wire whose ring takes `times` ({bytes: seconds}) on `ranks` ranks: least squares of the relative error."""
    rows = [(2 * (ranks - 1) / seconds, 2 * (ranks - 1) / ranks * size / seconds) for size, seconds in times.items()]
    ll, lb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    l1, b1 = (sum(row[i] for row in rows) for i in (0, 1))
    latency, slowness = (l1 * bb - b1 * lb) / (ll * bb - lb * lb), (b1 * ll - l1 * lb) / (ll * bb - lb * lb)
    return Wire(max(latency, 0.0), 1 / slowness, cores)


def spread_of(steps):
    """The standard deviation of the logarithm, by the middle two thirds: one step that somebody disturbed is no distribution."""
    cuts = statistics.quantiles([math.log(step) for step in steps], n=100)
    return (cuts[83] - cuts[15]) / 2


def tail(steps, ranks, draws=20_000):
    """The mean of the slowest of `ranks` of the steps, drawn at random, over the mean of one."""
    chance = random.Random(0)
    return statistics.fmean(max(chance.choices(steps, k=ranks)) for _ in range(draws)) / statistics.fmean(steps)


# --- the machines on paper ---

# ResNet-50 on A100s: 25.6 million weights in float32; 2470 images/s on one in mixed precision, 16621 on 8 (NVIDIA, DeepLearningExamples,
# PyTorch/Classification/ConvNets/resnet50v1.5/README.md). `fixed` is a guess: a forward pass of 1 to 8 images takes 13 ms in that table.
IMAGES = 256
RESNET = Work(fixed=0.025, each=1 / 2470 - 0.025 / IMAGES, buckets=(1.0e6, *[25.3e6] * 4), groups=18, stages=18, micro_batches=32, cut=2 * 200_704)
# NCCL's own model (NVIDIA/nccl, src/graph/tuning.cc): 3.4 us a message over NVLink, 9.6 us over InfiniBand, 235 GB/s among A100s of a node;
# 200 Gbit/s of HDR InfiniBand a GPU.
NVLINK, INFINIBAND = Wire(3.4e-6, 235e9), Wire(9.6e-6, 25e9)
# 94.9 % of the bits are TCP's payload at an MTU of 1500. The latency is a guess.
ETHERNET = Wire(50e-6, 10e9 / 8 * 0.949)
ASSUMED_SPREAD = 0.03
WORLDS = [2**power for power in range(13)]


def machines(loopback, work, samples, spread):
    """{name: (Machine, Work, samples a rank)}."""
    return {
        "this machine's core and loopback": (Machine(loopback, loopback, 1, spread, False, scatter=2), work, samples),
        "an A100 a node, 10 GbE": (Machine(ETHERNET, ETHERNET, 1, ASSUMED_SPREAD, True), RESNET, IMAGES),
        "8 A100s a node, NVLink and HDR InfiniBand": (Machine(NVLINK, INFINIBAND, 8, ASSUMED_SPREAD, True), RESNET, IMAGES),
    }


def payoff(there):
    """(lines of a table, sentences): where each strategy stops paying on each machine."""
    head = ["machine", "strategy", "efficiency at 8, 64, 512, 4096 ranks, a batch each", "below 50 %", "one batch shared out: below 50 %", "fastest"]
    lines, sentences = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], []
    for place, (machine, work, samples) in there.items():
        for name, step in step_time.STRATEGIES.items():
            values = [step_time.efficiency(step, work, machine, samples, ranks, True) for ranks in (8, 64, 512, 4096)]
            ends = [step_time.stops(step, work, machine, samples, weak, WORLDS) for weak in (True, False)]
            shown = ", ".join(f"{100 * value:.0f} %" if value else "-" for value in values)
            lines.append(f"| {place} | {name} | {shown} | {at(ends[0][0])} | {at(ends[1][0])} | {at(ends[1][1])} |")
        for weak, case in ((True, "a batch each"), (False, f"one batch of {samples} shared out")):
            ends = {name: step_time.stops(step, work, machine, samples, weak, WORLDS)[0] for name, step in step_time.STRATEGIES.items()}
            groups = {
                ranks: [name for name in ends if ends[name] == ranks] for ranks in sorted(set(ends.values()), key=lambda ranks: ranks or math.inf)
            }
            said = "; ".join(f"{', '.join(names)} {f'at W = {ranks}' if ranks else 'not up to 4096'}" for ranks, names in groups.items())
            sentences.append(f"- {place}, {case}: stops paying: {said}.")
    return lines, sentences


def at(ranks):
    return f"W = {ranks}" if ranks else "not up to 4096"


def plot(there, path):
    """Efficiency over W, each rank its batch above, one batch shared out below. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    for row, weak in zip(figure.subplots(2, len(there), sharex=True, sharey=True), (True, False), strict=True):
        for axes, (place, (machine, work, samples)) in zip(row, there.items(), strict=True):
            for name, step in step_time.STRATEGIES.items():
                axes.plot(WORLDS, [step_time.efficiency(step, work, machine, samples, ranks, weak) for ranks in WORLDS], ".-", label=name)
            axes.axhline(0.5, color="grey", linewidth=0.5)
            axes.set(xscale="log", ylim=(0, 1.05), title=place if weak else None, xlabel="" if weak else "ranks")
            axes.set_xscale("log", base=2)
        row[0].set_ylabel("efficiency, " + ("a batch a rank" if weak else "one batch shared out"))
    row[0].legend(fontsize="small")
    figure.savefig(path, dpi=100)


# --- the report ---


def compared(head, rows, worlds):
    """A table of predictions and measurements; rows: {name: {ranks: (predicted seconds, measured seconds)}}."""
    lines = [f"| {head}, ms predicted / measured | " + " | ".join(f"W = {size}" for size in worlds) + " |", "|---" * (len(worlds) + 1) + "|"]
    for name, found in rows.items():
        cells = (f"{1e3 * guess:.1f} / {1e3 * truth:.1f} ({100 * (guess / truth - 1):+.0f} %)" for guess, truth in (found[size] for size in worlds))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def formulas(wire, sizes, ranks):
    """{(collective, bytes): seconds}, as `collectives` measures them."""
    ways = {"all-reduce": step_time.ring, "ring_sum": step_time.ring, "tree_sum": step_time.tree, "server_sum": step_time.server,
            "all-gather": step_time.gather, "reduce-scatter": step_time.ring}  # fmt: skip
    return {(name, size): way(wire, size, ranks) for name, way in ways.items() for size in sizes}


def check_collectives(worlds, rounds, wired):
    """(the Wire fitted to the all-reduces of two ranks, lines): what it predicts of all collectives, and what they took."""
    times = {size: slower(measured(size, collectives, SIZES, rounds, wired=wired)) for size in worlds}
    wire = fitted({size: times[2]["all-reduce", size] for size in SIZES}, 2, None if wired else len(os.sched_getaffinity(0)))
    rows = {}
    for name, size in times[2]:
        rows[f"{name}, {size / 1e6:g} MB"] = {ranks: (formulas(wire, SIZES, ranks)[name, size], times[ranks][name, size]) for ranks in worlds}
    return wire, compared("on cables" if wired else "on loopback", rows, worlds)


def check_steps(worlds, wire, steps, names):
    """Lines: whole steps of the sleeping net on cables. Its compute time is one rank's; its processes share cores for what they do not sleep."""
    alone, busy, _ = stepped(1, steps, *SLEEPER)
    layers = [4 * (256 * 256 + 256)] * 7 + [4 * 257]
    cores, rows = len(os.sched_getaffinity(0)), {}
    for name in names:
        overrides, formula = STEPS[name]
        rows[name] = {}
        for ranks in worlds:
            waits = max(0, ranks / cores - 1) * busy  # of the processes for the cores they share
            work = Work(0.0, (alone + waits) / 8, step_time.buckets(reversed(layers), 0.5 * 2**20, 2**20), 8, 8, 4, 4 * 256)
            guess = formula(work, Machine(wire, wire, 1, 0.0, formula is not step_time.fsdp, scatter=2), 8, ranks)
            shared = [f"trainer.batch_size_per_rank={8 * ranks}"] * (name == "pipeline")  # whose ranks read one batch
            rows[name][ranks] = guess, stepped(ranks, steps, *SLEEPER, *overrides, *shared, wired=True)[0]
    return compared(f"a step of {1e3 * alone:.0f} ms on cables", rows, worlds)


def check_stragglers(worlds, steps):
    """Lines: steps of the sleeping net whose ranks' times are scattered by 0.2, without cables."""
    alone, busy, _ = stepped(1, 8, *SLEEPER)
    rows = {
        ranks: (alone * math.exp(0.02) * step_time.slowest(ranks, 0.2), stepped(ranks, steps, *SLEEPER, "+model.spread=0.2")[0]) for ranks in worlds
    }
    return compared("scattered", {"each rank's step times exp(0.2 N(0, 1))": rows}, worlds)


def check_real(worlds, wire, steps):
    """(the Work of a real net on one core, its spread, lines): its steps on ranks that share this machine's cores."""
    alone, _, walls = stepped(1, 5 * steps, *REAL)
    middling, half = statistics.median(walls), statistics.median(stepped(1, steps, *REAL, "trainer.batch_size_per_rank=64")[2])
    weights = 64 * 1024 + 1024 + 1024 * 1024 + 1024 + 10 * 1024 + 10
    each = max((middling - half) / 64, 0.0)
    work = Work(max(middling - 128 * each, 0.0), each, (4.0 * weights,), 3, 3, 4, 4 * 1024)
    guess = {ranks: wire.crowd(ranks) * middling + step_time.ring(wire, work.size, ranks) for ranks in worlds}
    rows = {"an mlp of 1.1 million weights": {ranks: (guess[ranks], statistics.median(stepped(ranks, steps, *REAL)[2])) for ranks in worlds}}
    spread = spread_of(walls)
    tails = ", ".join(f"{step_time.slowest(ranks, spread):.3f} / {tail(walls, ranks):.3f} at W = {ranks}" for ranks in worlds)
    said = f"Its {len(walls)} steps on one core scatter by {spread:.3f}; the slowest of W over the mean, predicted / drawn from them: {tails}."
    return work, spread, [*compared("on shared cores", rows, worlds), "", said]


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="two ranks, two strategies, few steps: to see that it runs")
    options.add_argument("--rounds", type=int, default=5, help="of each collective; how many steps are timed grows with it")
    options.add_argument("--docs", action="store_true", help="put tables and plot into docs/")
    options.add_argument("--out", type=Path, default=ROOT / "outputs" / "scaling")
    asked = options.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker,ignore::FutureWarning"  # of all_gather_into_tensor, whose new name older torches lack
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hosts on cables have no names, which c10d would tell each time
    asked.out.mkdir(parents=True, exist_ok=True)
    worlds, rounds, steps = ((2,), 3, EVERY) if asked.quick else ((2, 4, 8), asked.rounds, EVERY * -(-3 * asked.rounds // 5))
    lines = []

    def tell(*more):
        print(*more, "", sep="\n", flush=True)
        lines.extend([*more, ""])

    loopback, report = check_collectives(worlds, rounds, wired=False)
    work, spread, real = check_real(worlds, loopback, 4 * steps)
    tell("| constant | fitted | |", "|---|---|---|",
         f"| loopback, a message | {1e6 * loopback.latency:.0f} us | all-reduces of 2 ranks, 4 kB to 4 MB |",
         f"| loopback, bandwidth | {loopback.bandwidth / 1e9:.2f} GB/s | |",
         f"| a step of the mlp without samples | {1e3 * work.fixed:.2f} ms | batches of 64 and 128 on one core |",
         f"| a sample | {1e6 * work.each:.0f} us | |",
         f"| spread of a step's logarithm | {spread:.3f} | the middle two thirds of {20 * steps} steps |")  # fmt: skip
    tell(*report)
    tell(*real)
    tell(*check_stragglers(worlds, 4 * steps))
    if os.geteuid() == 0 and os.path.exists("/dev/net/tun"):
        wire, report = check_collectives(worlds, rounds, wired=True)
        tell(f"The cable's {1e3 * LATENCY:g} ms and {8e-6 * BANDWIDTH:g} Mbit/s are, to gloo's all-reduce of 2 ranks, {1e3 * wire.latency:.2f} ms "
             f"a message and {8e-6 * wire.bandwidth:.0f} Mbit/s.")  # fmt: skip
        tell(*report)
        tell(*check_steps(worlds, wire, steps, list(STEPS)[:2] if asked.quick else STEPS))
    else:
        tell("(Nothing measured on cables: they want root and /dev/net/tun.)")
    there = machines(replace(loopback, cores=None), work, 128, spread)
    table, sentences = payoff(there)
    tell(*table)
    tell(*sentences)

    text = "\n".join(lines)
    (asked.out / "scaling.md").write_text(text)
    print(f"tables: {asked.out / 'scaling.md'}")
    if asked.docs:
        page, mark = ROOT / "docs" / "scaling.md", "<!-- below: bench/scaling.py --docs -->\n"
        page.write_text(page.read_text().partition(mark)[0] + mark + "\n" + text.rstrip() + "\n")
    try:
        for path in [asked.out / "scaling.png"] + asked.docs * [ROOT / "docs" / "scaling.png"]:
            plot(there, path)
            print(f"plot:   {path}")
    except ImportError:
        print(f"no plot without matplotlib; type {sys.executable} -m pip install -r requirements-bench.txt", file=sys.stderr)


if __name__ == "__main__":
    main()
