"""How long a training step takes on W ranks, as formulas, and what they predict for up to 4096. See SCALING.md.

python bench/scaling.py [--out=outputs/scaling]

Seconds, bytes and samples. The collectives were checked on two to eight ranks (SCALING.md has the figures).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import harness


@dataclass(frozen=True)
class Wire:
    """latency: of a message. bandwidth: bytes per second of a rank, each way at once."""

    latency: float
    bandwidth: float


Collective = Callable[[Wire, float, float], float]
"""(wire, bytes, ranks) -> seconds"""


def ring(wire: Wire, size: float, ranks: float) -> float:
    """All-reduce in a ring (Patarasuk and Yuan 2009): 2(W-1) messages after one another, of a W-th each."""
    return 2 * (ranks - 1) * (wire.latency + size / ranks / wire.bandwidth)


def tree(wire: Wire, size: float, ranks: float) -> float:
    """All-reduce by recursive halving and doubling (Thakur et al. 2005): 2 log W messages, as many bytes as a ring."""
    return 2 * (math.ceil(math.log2(ranks)) * wire.latency + (ranks - 1) / ranks * size / wire.bandwidth)


def server(wire: Wire, size: float, ranks: float) -> float:
    """A synchronous parameter server (Li et al. 2014): all gradients arrive over its one cable, and the sum leaves."""
    return 2 * (wire.latency + (ranks - 1) * size / wire.bandwidth) if ranks > 1 else 0.0


def gather(wire: Wire, size: float, ranks: float) -> float:
    """All-gather, or reduce-scatter, in a ring: half an all-reduce."""
    return ring(wire, size, ranks) / 2


@dataclass(frozen=True)
class Machine:
    """Nodes of `local` ranks, which communicate over `near` inside a node and over `far` between nodes.

    spread: standard deviation of the logarithm of a rank's step time.
    """

    near: Wire
    far: Wire
    local: int
    spread: float

    def combine(self, way: Collective, size: float, ranks: int) -> float:
        """Seconds of one collective over all ranks: inside nodes first, so a rank sends 1/local of the bytes far."""
        here = min(ranks, self.local)
        nodes = ranks / here
        if way is server:
            return server(self.near, size, here) + (server(self.far, size, ranks - here + 1) if nodes > 1 else 0)
        near = ring(self.near, size, here) * (0.5 if way is gather else 1)
        return near + (way(self.far, size / here, nodes) if nodes > 1 else 0)


@dataclass(frozen=True)
class Work:
    """What is trained. fixed, each: seconds of a step without samples, and of each sample; a third is the forward pass.

    buckets: bytes of gradient that DDP sends at once, in the order of the backward pass. groups: layers that FSDP
    gathers one at a time. stages: of the longest pipeline. micro_batches: in flight through it. cut: bytes of a
    sample's activations between two stages.
    """

    fixed: float
    each: float
    buckets: tuple[float, ...]
    groups: int
    stages: int
    micro_batches: int
    cut: float

    @property
    def size(self) -> float:
        return sum(self.buckets)

    def compute(self, samples: float) -> float:
        return self.fixed + self.each * samples


Step = Callable[[Work, Machine, float, int], float]
"""(work, machine, samples of a rank, ranks) -> seconds of a step"""


def slowest(ranks: int, spread: float) -> float:
    """The mean of the slowest of `ranks` step times over the mean of one, for independent log-normal times."""
    if ranks == 1 or not spread:
        return 1.0
    cuts, normal = 4000, NormalDist()
    # E[max] is the integral of the quantile of u^(1/W) over u in (0, 1).
    quantiles = (normal.inv_cdf(math.exp(math.log((cut + 0.5) / cuts) / ranks)) for cut in range(cuts))
    return sum(math.exp(spread * z) for z in quantiles) / cuts / math.exp(spread**2 / 2)


def overlapped(forward: float, backward: float, buckets: Sequence[float], combine: Callable[[float], float]) -> float:
    """DDP (Li et al. 2020): a bucket is sent when the backward pass has passed it and the one before has arrived.

    The backward pass is taken to be spread over the layers as the bytes are.
    """
    done, arrived = 0.0, 0.0
    for size in buckets:
        done += size
        arrived = max(arrived, forward + backward * done / sum(buckets)) + combine(size)
    return max(arrived, forward + backward)


def ddp(work: Work, machine: Machine, samples: float, ranks: int, way: Collective = ring, shrink: int = 1) -> float:
    whole = work.compute(samples) * slowest(ranks, machine.spread)
    return overlapped(whole / 3, whole * 2 / 3, work.buckets, lambda size: machine.combine(way, size / shrink, ranks))


def one_by_one(work: Work, machine: Machine, samples: float, ranks: int, way: Collective) -> float:
    """Each bucket is waited for: gradient_sync=ring and parameter_server."""
    whole = work.compute(samples) * slowest(ranks, machine.spread)
    return whole + sum(machine.combine(way, size, ranks) for size in work.buckets)


def fsdp(work: Work, machine: Machine, samples: float, ranks: int) -> float:
    """Weights are gathered for the forward and for the backward pass, gradients scattered (Rajbhandari et al. 2020)."""
    whole = work.compute(samples) * slowest(ranks, machine.spread)
    once = work.groups * machine.combine(gather, work.size / work.groups, ranks)
    exposed = 2 * once / work.groups  # the first gather and the last scatter
    return max(whole / 3, once) + max(whole * 2 / 3, 2 * once) + exposed


def pipeline(work: Work, machine: Machine, samples: float, ranks: int) -> float:
    """`samples` a rank, through every stage: M + W - 1 turns (GPipe, Huang et al. 2019). Infinite for W > stages."""
    if ranks > work.stages:
        return math.inf
    wire = machine.near if ranks <= machine.local else machine.far
    computing = (work.compute(samples * ranks) - work.fixed) / ranks / work.micro_batches
    turn = computing * slowest(ranks, machine.spread)
    if ranks > 1:
        cut = work.cut * samples * ranks / work.micro_batches
        turn += 2 * (wire.latency + cut / wire.bandwidth)
    return work.fixed + (work.micro_batches + ranks - 1) * turn


STRATEGIES: dict[str, Step] = {
    "DDP by ring": ddp,
    "DDP by tree": partial(ddp, way=tree),
    "DDP in bf16": partial(ddp, shrink=2),
    "FSDP": fsdp,
    "pipeline": pipeline,
    "parameter server": partial(one_by_one, way=server),
}


def efficiency(step: Step, work: Work, machine: Machine, samples: float, ranks: int, weak: bool) -> float:
    """Samples per second of `ranks` ranks over `ranks` times those of one.

    samples: of one rank's step. With `weak` scaling each further rank brings as many; else they are shared.
    """
    alone = work.compute(samples)
    if weak:
        return alone / step(work, machine, samples, ranks)
    return alone / ranks / step(work, machine, samples / ranks, ranks)


def stops(
    step: Step, work: Work, machine: Machine, samples: float, weak: bool, worlds: Sequence[int]
) -> tuple[int | None, int | None]:
    """(the first W with an efficiency below one half, the W with the most samples/s); None: not in `worlds`."""
    found = [(ranks, efficiency(step, work, machine, samples, ranks, weak)) for ranks in worlds]
    most = max(found, key=lambda pair: pair[0] * pair[1])[0]
    return next((ranks for ranks, value in found if value < 0.5), None), None if most == worlds[-1] else most


# ResNet-50 on A100s: 25.6 million weights in float32; 2470 images/s on one in mixed precision, 16621 on 8 (NVIDIA,
# DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md). `fixed` is a guess: a forward pass of
# 1 to 8 images takes 13 ms in that table.
IMAGES = 256
RESNET = Work(fixed=0.025, each=1 / 2470 - 0.025 / IMAGES, buckets=(1.0e6, *[25.3e6] * 4), groups=18, stages=18,
              micro_batches=32, cut=2 * 200_704)  # fmt: skip
# NCCL's own model (NVIDIA/nccl, src/graph/tuning.cc): 3.4 us a message over NVLink, 9.6 us over InfiniBand, 235 GB/s
# among A100s of a node; 200 Gbit/s of HDR InfiniBand a GPU.
NVLINK, INFINIBAND = Wire(3.4e-6, 235e9), Wire(9.6e-6, 25e9)
# 94.9 % of the bits are TCP's payload at an MTU of 1500. The latency is a guess, and so is the spread of 0.03.
ETHERNET = Wire(50e-6, 10e9 / 8 * 0.949)
MACHINES = {
    "an A100 a node, 10 GbE": Machine(ETHERNET, ETHERNET, 1, 0.03),
    "8 A100s a node, NVLink and HDR InfiniBand": Machine(NVLINK, INFINIBAND, 8, 0.03),
}
WORLDS = [2**power for power in range(13)]


def payoff() -> str:
    """A table: where each strategy stops paying on each machine."""
    rows = []
    for place, machine in MACHINES.items():
        for name, step in STRATEGIES.items():
            values = [efficiency(step, RESNET, machine, IMAGES, ranks, True) for ranks in (8, 64, 512, 4096)]
            ends = [stops(step, RESNET, machine, IMAGES, weak, WORLDS) for weak in (True, False)]
            shown = ", ".join(f"{value:.0%}" if value else "-" for value in values)
            limits = [f"W = {ranks}" if ranks else "not up to 4096" for ranks in (ends[0][0], *ends[1])]
            rows.append([place, name, shown, *limits])
    head = ["machine", "strategy", "efficiency at 8, 64, 512, 4096 ranks, a batch each", "below 50 %",
            "one batch shared out: below 50 %", "fastest"]  # fmt: skip
    return harness.table(head, rows)


def main() -> None:
    asked = harness.parse(harness.parser(__doc__, "scaling"))
    text = payoff()
    print(text)
    harness.save(asked.out, "scaling", text)


if __name__ == "__main__":
    main()
