"""How long a training step takes on W ranks, as formulas, and what they predict for up to 4096. See SCALING.md.

Seconds, bytes and samples. The collectives were checked on two to eight ranks (SCALING.md has the figures).
"""

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any

import harness

Wire = namedtuple("Wire", "latency bandwidth")  # seconds of a message, and bytes per second of a rank, each way at once
# Nodes of `local` ranks, which communicate over the wire `near` inside a node and over `far` between nodes. spread:
# standard deviation of the logarithm of a rank's step time.
Machine = namedtuple("Machine", "near far local spread")
# What is trained. fixed, each: seconds of a step without samples, and of each sample; a third is the forward pass.
# buckets: bytes of gradient that DDP sends at once, in the order of the backward pass. groups: layers that FSDP gathers
# one at a time. stages: of the longest pipeline. micro_batches: in flight through it. cut: bytes of a sample's
# activations between two stages.
Work = namedtuple("Work", "fixed each buckets groups stages micro_batches cut")


# Collectives: (wire, bytes, ranks) -> seconds
def ring(wire: Wire, size: float, ranks: float) -> float:
    """All-reduce in a ring (Patarasuk and Yuan 2009): 2(W-1) messages after one another, of a W-th each."""
    return 2 * (ranks - 1) * (wire.latency + size / ranks / wire.bandwidth)


def tree(wire: Wire, size: float, ranks: float) -> float:
    """All-reduce by recursive halving and doubling (Thakur et al. 2005): 2 log W messages, as many bytes as a ring."""
    return 2 * (math.ceil(math.log2(ranks)) * wire.latency + (ranks - 1) / ranks * size / wire.bandwidth)


def server(wire: Wire, size: float, ranks: float) -> float:
    """A synchronous parameter server (Li et al. 2014): all gradients arrive over its one cable, and the sum leaves."""
    return 2 * (wire.latency + (ranks - 1) * size / wire.bandwidth) if ranks > 1 else 0.0


def combine(machine: Machine, way: Any, size: float, ranks: int) -> float:
    """Seconds of one collective over all ranks: inside nodes first, so a rank sends 1/local of the bytes far."""
    here = min(ranks, machine.local)
    nodes = ranks / here
    if way is server:
        far = server(machine.far, size, ranks - here + 1) if nodes > 1 else 0
        return server(machine.near, size, here) + far
    return ring(machine.near, size, here) + (way(machine.far, size / here, nodes) if nodes > 1 else 0)


def slowest(ranks: int, spread: float) -> float:
    """The mean of the slowest of `ranks` step times over the mean of one, for independent log-normal times."""
    if ranks == 1 or not spread:
        return 1.0
    cuts, normal = 4000, NormalDist()
    # E[max] is the integral of the quantile of u^(1/W) over u in (0, 1).
    quantiles = (normal.inv_cdf(math.exp(math.log((cut + 0.5) / cuts) / ranks)) for cut in range(cuts))
    return sum(math.exp(spread * z) for z in quantiles) / cuts / math.exp(spread**2 / 2)


def compute(work: Work, machine: Machine, samples: float, ranks: int = 1) -> float:
    """Seconds of a step's computing, of the slowest rank."""
    return (work.fixed + work.each * samples) * slowest(ranks, machine.spread)


def overlapped(forward: float, backward: float, buckets: Sequence[float], combine: Callable[[float], float]) -> float:
    """DDP (Li et al. 2020): a bucket is sent when the backward pass has passed it and the one before has arrived.

    The backward pass is taken to be spread over the layers as the bytes are.
    """
    done, arrived = 0.0, 0.0
    for size in buckets:
        done += size
        arrived = max(arrived, forward + backward * done / sum(buckets)) + combine(size)
    return max(arrived, forward + backward)


# Steps: (work, machine, samples of a rank, ranks) -> seconds
def ddp(work: Work, machine: Machine, samples: float, ranks: int, way: Any = ring, shrink: int = 1) -> float:
    whole = compute(work, machine, samples, ranks)
    return overlapped(whole / 3, whole * 2 / 3, work.buckets, lambda size: combine(machine, way, size / shrink, ranks))


def parameter_server(work: Work, machine: Machine, samples: float, ranks: int) -> float:
    """Each bucket is waited for."""
    whole = compute(work, machine, samples, ranks)
    return whole + sum(combine(machine, server, size, ranks) for size in work.buckets)


def fsdp(work: Work, machine: Machine, samples: float, ranks: int) -> float:
    """Weights are gathered twice, gradients scattered, each half an all-reduce (Rajbhandari et al. 2020)."""
    whole = compute(work, machine, samples, ranks)
    once = work.groups * combine(machine, ring, sum(work.buckets) / work.groups, ranks) / 2
    exposed = 2 * once / work.groups  # the first gather and the last scatter
    return max(whole / 3, once) + max(whole * 2 / 3, 2 * once) + exposed


def pipeline(work: Work, machine: Machine, samples: float, ranks: int) -> float:
    """`samples` a rank, through every stage: M + W - 1 turns (GPipe, Huang et al. 2019). Infinite for W > stages."""
    if ranks > work.stages:
        return math.inf
    wire = machine.near if ranks <= machine.local else machine.far
    turn = work.each * samples / work.micro_batches * slowest(ranks, machine.spread)
    if ranks > 1:
        turn += 2 * (wire.latency + work.cut * samples * ranks / work.micro_batches / wire.bandwidth)
    return work.fixed + (work.micro_batches + ranks - 1) * turn


def efficiency(step: Any, work: Work, machine: Machine, samples: float, ranks: int, weak: bool) -> float:
    """Samples/s over `ranks` times those of one rank. With `weak` scaling each rank has `samples`; else they share."""
    share = 1 if weak else ranks
    return compute(work, machine, samples) / share / step(work, machine, samples / share, ranks)


STRATEGIES = {"DDP by ring": ddp, "DDP by tree": partial(ddp, way=tree), "DDP in bf16": partial(ddp, shrink=2),
              "FSDP": fsdp, "pipeline": pipeline, "parameter server": parameter_server}  # fmt: skip
# ResNet-50 on A100s: 25.6 million weights in float32, 2470 images/s on one in mixed precision (NVIDIA's
# DeepLearningExamples, resnet50v1.5). `fixed` is a guess: a forward pass of 1 to 8 images takes 13 ms there.
IMAGES = 256
RESNET = Work(fixed=0.025, each=1 / 2470 - 0.025 / IMAGES, buckets=(1.0e6, *[25.3e6] * 4), groups=18, stages=18,
              micro_batches=32, cut=2 * 200_704)  # fmt: skip
# NCCL's own model (src/graph/tuning.cc); 200 Gbit/s of HDR InfiniBand a GPU.
NVLINK, INFINIBAND = Wire(3.4e-6, 235e9), Wire(9.6e-6, 25e9)
# 94.9 % of the bits are TCP's payload at an MTU of 1500. The latency is a guess, and so is the spread of 0.03.
ETHERNET = Wire(50e-6, 10e9 / 8 * 0.949)
MACHINES = {
    "an A100 a node, 10 GbE": Machine(ETHERNET, ETHERNET, 1, 0.03),
    "8 A100s a node, NVLink and HDR InfiniBand": Machine(NVLINK, INFINIBAND, 8, 0.03),
}
WORLDS = [2**power for power in range(13)]


if __name__ == "__main__":  # a table: where each strategy stops paying on each machine
    asked, rows = harness.parse(__doc__, "scaling"), []
    for place, machine in MACHINES.items():
        for name, step in STRATEGIES.items():
            share = partial(efficiency, step, RESNET, machine, IMAGES)
            weak = {ranks: share(ranks, weak=True) for ranks in WORLDS}
            strong = {ranks: share(ranks, weak=False) for ranks in WORLDS}
            shown = ", ".join(f"{weak[ranks]:.0%}" if weak[ranks] else "-" for ranks in (8, 64, 512, 4096))
            ends = [next((ranks for ranks in WORLDS if found[ranks] < 0.5), None) for found in (weak, strong)]
            most = max(WORLDS, key=lambda ranks: ranks * strong[ranks])
            ends.append(None if most == WORLDS[-1] else most)
            rows.append([place, name, shown, *(f"W = {ranks}" if ranks else "not up to 4096" for ranks in ends)])
    head = ["machine", "strategy", "efficiency at 8, 64, 512, 4096 ranks, a batch each", "below 50 %",
            "one batch shared out: below 50 %", "fastest"]  # fmt: skip
    harness.save(asked.out, "scaling", harness.table(head, rows))
