"""Fits a Wire of bench/step_time.py to cables, checks its collectives on them, and predicts up to 4096 ranks.

python bench/scaling.py [--quick] [--rounds=5] [--out=outputs/scaling]

All-reduces of two ranks on cables (bench/cable.py) of 1 ms and 100 Mbit/s give the constants; collectives of 2, 4 and 8
ranks check them. The cables need root; without it nothing is measured, and the predictions for two GPU clusters remain.
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cable
import harness
import step_time
from step_time import STRATEGIES, Machine, Wire, Work, efficiency

LATENCY, BANDWIDTH = 1e-3, 100e6 / 8  # of a cable
SIZES = (4_000, 40_000, 400_000, 4_000_000)  # bytes
WAYS: dict[str, step_time.Collective] = {
    "all-reduce": step_time.ring,
    "ring_sum": step_time.ring,
    "server_sum": step_time.server,
    "all-gather": step_time.gather,
    "reduce-scatter": step_time.ring,  # gloo makes a whole all-reduce of it
}

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


def on_host(hosts: Sequence[str], function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) on this rank's host, on one core."""
    cable.enter(hosts[int(os.environ["RANK"])])
    os.environ.update(MASTER_ADDR="10.77.0.10", GLOO_SOCKET_IFNAME="eth0")
    harness.pin_to_core()
    return function(*args)


def time_collectives(rounds: int) -> dict[tuple[str, int], float]:
    """In a rank: {(collective, bytes): seconds of the fastest round}."""
    import torch
    import torch.distributed as dist

    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import ParameterServer, Ring

    with join_world("gloo", 120) as world:
        run: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
            "all-reduce": lambda vector, part: dist.all_reduce(vector),
            "ring_sum": lambda vector, part: Ring().add_up(world.rank, world.size, vector),
            "server_sum": lambda vector, part: ParameterServer().add_up(world.rank, world.size, vector),
            "all-gather": dist.all_gather_into_tensor,
            "reduce-scatter": lambda vector, part: dist.reduce_scatter_tensor(part, vector),
        }
        found = {}
        for name, size in itertools.product(run, SIZES):
            seconds = []
            for _ in range(rounds + 1):  # the first one makes the connections
                vector = torch.zeros(size // 4)
                part = vector.chunk(world.size)[world.rank].clone()
                world.barrier()
                began = time.perf_counter()
                run[name](vector, part)
                seconds.append(time.perf_counter() - began)
            found[name, size] = min(seconds[1:])
        return found


def fit_wire(times: Sequence[float]) -> Wire:
    """The Wire whose ring of two ranks takes `times`, by SIZES: least squares of the relative error."""
    rows = [(2 / took, size / took) for size, took in zip(SIZES, times, strict=True)]
    ll, lb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    l1, b1 = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = ll * bb - lb * lb
    return Wire(max((l1 * bb - b1 * lb) / determinant, 0.0), determinant / (b1 * ll - l1 * lb))


def check(worlds: Sequence[int], rounds: int) -> str:
    """The Wire fitted to the all-reduces of two ranks, and a table: what it predicts, and what collectives took."""
    from support.worlds import in_world

    times = {}
    for ranks in worlds:
        with cable.cables(ranks, LATENCY, BANDWIDTH) as hosts:
            found = in_world(ranks, on_host, hosts, time_collectives, rounds, limit=900)
        times[ranks] = {key: max(rank[key] for rank in found) for key in found[0]}
    wire = fit_wire([times[2]["all-reduce", size] for size in SIZES])
    rows = []
    for name, size in times[2]:
        row = [f"{name}, {size / 1e6:g} MB"]
        for ranks in worlds:
            guess, took = WAYS[name](wire, size, ranks), times[ranks][name, size]
            row.append(f"{1e3 * guess:.1f} / {1e3 * took:.1f} ({guess / took - 1:+.0%})")
        rows.append(row)
    about = f"The cable's {1e3 * LATENCY:g} ms and {8e-6 * BANDWIDTH:g} Mbit/s are, to gloo's all-reduce of 2 ranks, "
    about += f"{1e3 * wire.latency:.2f} ms a message and {8e-6 * wire.bandwidth:.0f} Mbit/s.\n\n"
    head = ["on cables, ms predicted / measured", *(f"W = {ranks}" for ranks in worlds)]
    return about + harness.table(head, rows)


def payoff() -> str:
    """A table: where each strategy stops paying on each machine."""
    rows = []
    for place, machine in MACHINES.items():
        for name, step in STRATEGIES.items():
            values = [efficiency(step, RESNET, machine, IMAGES, ranks, True) for ranks in (8, 64, 512, 4096)]
            ends = [step_time.stops(step, RESNET, machine, IMAGES, weak, WORLDS) for weak in (True, False)]
            shown = ", ".join(f"{value:.0%}" if value else "-" for value in values)
            limits = [f"W = {ranks}" if ranks else "not up to 4096" for ranks in (ends[0][0], *ends[1])]
            rows.append([place, name, shown, *limits])
    head = ["machine", "strategy", "efficiency at 8, 64, 512, 4096 ranks, a batch each", "below 50 %",
            "one batch shared out: below 50 %", "fastest"]  # fmt: skip
    return harness.table(head, rows)


def main() -> None:
    asked = harness.parse(harness.parser(__doc__, "scaling", rounds=5))
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hosts on cables have no names, which c10d would report each time
    measured = "(Nothing is measured: cables need root and /dev/net/tun.)\n"
    if os.geteuid() == 0 and Path("/dev/net/tun").exists():
        measured = check((2,) if asked.quick else (2, 4, 8), asked.rounds)
    text = f"{measured}\n{payoff()}"
    print(text)
    harness.save(asked.out, "scaling", text)


if __name__ == "__main__":
    main()
