"""How long a training step takes on W ranks, as formulas; docs/scaling.md explains them.

Seconds, bytes and samples everywhere. Nothing is imported that a pocket calculator lacks.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Wire:
    """latency: of a message, from one rank's memory to another's; bandwidth: of a rank, each way at once.

    cores: how many cores all ranks share, where a message is work for them; None where each rank has its own.
    """

    latency: float
    bandwidth: float
    cores: int | None = None

    def crowd(self, ranks):
        """How many ranks share a core."""
        return 1 if self.cores is None else max(1, ranks / self.cores)


def ring(wire, size, ranks):
    """All-reduce in a ring (Patarasuk and Yuan 2009): 2(W-1) messages after one another, of a W-th each."""
    return wire.crowd(ranks) * 2 * (ranks - 1) * (wire.latency + size / ranks / wire.bandwidth)


def tree(wire, size, ranks):
    """All-reduce by recursive halving, then doubling (Thakur, Rabenseifner and Gropp 2005): 2 log W messages, as many bytes as a ring."""
    return wire.crowd(ranks) * 2 * (math.ceil(math.log2(ranks)) * wire.latency + (ranks - 1) / ranks * size / wire.bandwidth)


def server(wire, size, ranks):
    """A synchronous parameter server (Li et al. 2014) that also works: all the others' gradients through its one cable, then the sum.

    Where ranks share cores it is still one of them that moves the bytes.
    """
    return 2 * (wire.crowd(ranks) * wire.latency + (ranks - 1) * size / wire.bandwidth) if ranks > 1 else 0.0


def gather(wire, size, ranks):
    """All-gather, or reduce-scatter, in a ring: half an all-reduce."""
    return ring(wire, size, ranks) / 2


@dataclass(frozen=True)
class Machine:
    """`local` ranks on a node that speak over `near`, and nodes that speak over `far`; what one rank computes is scattered by `spread`.

    spread: the standard deviation of the logarithm of a rank's step time. overlaps: whether DDP and FSDP send while a rank computes; not
    where sending is work for the core that computes. scatter: what a reduce-scatter sends, in all-gathers; 2 by gloo, which makes a
    whole all-reduce of it.
    """

    near: Wire
    far: Wire
    local: int
    spread: float
    overlaps: bool
    scatter: int = 1

    def combine(self, way, size, ranks):
        """Seconds of one collective over all ranks: within nodes first, so that each rank has 1/local of the bytes to send far."""
        here = min(ranks, self.local)
        nodes = ranks / here
        if way is server:
            return server(self.near, size, here) + (server(self.far, size, ranks - here + 1) if nodes > 1 else 0)
        return ring(self.near, size, here) * (0.5 if way is gather else 1) + (way(self.far, size / here, nodes) if nodes > 1 else 0)


@dataclass(frozen=True)
class Work:
    """What is trained. fixed, each: seconds of a step without samples, and of each sample; a third of it is the forward pass.

    buckets: bytes of gradient that DDP sends at once, in the order in which the backward pass leaves them. groups: layers that FSDP
    gathers one at a time; stages: the longest pipeline; micro_batches: in flight through it; cut: bytes of a sample's activations
    between two stages.
    """

    fixed: float
    each: float
    buckets: tuple
    groups: int
    stages: int
    micro_batches: int
    cut: float

    @property
    def size(self):
        return sum(self.buckets)

    def compute(self, samples):
        return self.fixed + self.each * samples


def slowest(ranks, spread):
    """The mean of the slowest of `ranks` step times over the mean of one, for independent log-normal times: the straggler tail."""
    if ranks == 1 or not spread:
        return 1.0
    cuts, normal = 4000, NormalDist()
    # E[max] is the integral of the quantile of u^(1/W) over u in (0, 1).
    quantiles = (normal.inv_cdf(math.exp(math.log((cut + 0.5) / cuts) / ranks)) for cut in range(cuts))
    return sum(math.exp(spread * z) for z in quantiles) / cuts / math.exp(spread**2 / 2)


def overlapped(forward, backward, buckets, combine):
    """DDP (Li et al. 2020): a bucket sets out when the backward pass has left it and the one before it has arrived.

    The k-th bucket is ready when its share of the bytes is: as if computing and bytes were spread alike over the layers.
    """
    done, arrived = 0, 0.0
    for size in buckets:
        done += size
        arrived = max(arrived, forward + backward * done / sum(buckets)) + combine(size)
    return max(arrived, forward + backward)


def ddp(work, machine, samples, ranks, way=ring, shrink=1):
    if not machine.overlaps:
        return one_by_one(work, machine, samples, ranks, way, shrink)
    whole = work.compute(samples) * slowest(ranks, machine.spread)
    return overlapped(whole / 3, whole * 2 / 3, work.buckets, lambda size: machine.combine(way, size / shrink, ranks))


def one_by_one(work, machine, samples, ranks, way, shrink=1):
    """Each bucket is waited for: gradient_sync=ring and parameter_server."""
    whole = work.compute(samples) * slowest(ranks, machine.spread)
    return whole + sum(machine.combine(way, size / shrink, ranks) for size in work.buckets)


def local_sgd(work, machine, samples, ranks, every):
    """The weights' average after `every` steps; whoever is slow in one of them may be fast in another."""
    return work.compute(samples) * slowest(ranks, machine.spread / math.sqrt(every)) + machine.combine(ring, work.size, ranks) / every


def fsdp(work, machine, samples, ranks):
    """Weights are gathered for the forward and again for the backward pass, and gradients scattered (Rajbhandari et al. 2020)."""
    whole = work.compute(samples) * slowest(ranks, machine.spread)
    once = work.groups * machine.combine(gather, work.size / work.groups, ranks)
    if machine.overlaps:  # all but the first gathering and the last scattering
        return max(whole / 3, once) + max(whole * 2 / 3, (1 + machine.scatter) * once) + (1 + machine.scatter) * once / work.groups
    return whole + (2 + machine.scatter) * once


def pipeline(work, machine, samples, ranks):
    """`samples` a rank, all of them through every stage in micro-batches: M + W - 1 turns (GPipe, Huang et al. 2019). Infinite
    where there are more ranks than stages."""
    if ranks > work.stages:
        return math.inf
    wire = machine.near if ranks <= machine.local else machine.far
    turn = (work.compute(samples * ranks) - work.fixed) / ranks / work.micro_batches * slowest(ranks, machine.spread)
    sent = 2 * (wire.latency + work.cut * samples * ranks / work.micro_batches / wire.bandwidth) * wire.crowd(ranks) if ranks > 1 else 0
    return work.fixed + (work.micro_batches + ranks - 1) * (turn + sent)


STRATEGIES = {
    "DDP by ring": ddp,
    "DDP by tree": lambda *case: ddp(*case, way=tree),
    "DDP in bf16": lambda *case: ddp(*case, shrink=2),
    "local SGD every 8": lambda *case: local_sgd(*case, every=8),
    "FSDP": fsdp,
    "pipeline": pipeline,
    "parameter server": lambda *case: one_by_one(*case, way=server),
}


def efficiency(step, work, machine, samples, ranks, weak):
    """Samples per second of `ranks` ranks over `ranks` times those of one.

    samples: of one rank's step; with `weak` scaling each further rank brings as many, without they are shared out.
    """
    alone = work.compute(samples)
    return alone / step(work, machine, samples, ranks) if weak else alone / ranks / step(work, machine, samples / ranks, ranks)


def stops(step, work, machine, samples, weak, worlds):
    """(the first W at which efficiency is below one half, the W of the most samples per second), None where there is none in `worlds`."""
    found = [(ranks, efficiency(step, work, machine, samples, ranks, weak)) for ranks in worlds]
    most = max(found, key=lambda pair: pair[0] * pair[1])[0]
    return next((ranks for ranks, value in found if value < 0.5), None), None if most == worlds[-1] else most


def buckets(sizes, cap, first):
    """DDP's: gradients in the order in which they come, closed at `cap` bytes, the first at `first`."""
    filled, now, limit = [], 0, first
    for size in sizes:
        now += size
        if now >= limit:
            filled.append(now)
            now, limit = 0, cap
    return tuple(filled + [now] * (now > 0))
