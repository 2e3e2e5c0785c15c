"""The tables of `make scaling`, and the machines that its formulas are evaluated for."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from step_time import STRATEGIES, Machine, Wire, Work, efficiency, stops

# ResNet-50 on A100s: 25.6 million weights in float32; 2470 images/s on one in mixed precision, 16621 on 8 (NVIDIA,
# DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md). `fixed` is a guess: a forward pass of
# 1 to 8 images takes 13 ms in that table.
IMAGES = 256
RESNET = Work(fixed=0.025, each=1 / 2470 - 0.025 / IMAGES, buckets=(1.0e6, *[25.3e6] * 4), groups=18, stages=18,
              micro_batches=32, cut=2 * 200_704)  # fmt: skip
# NCCL's own model (NVIDIA/nccl, src/graph/tuning.cc): 3.4 us a message over NVLink, 9.6 us over InfiniBand, 235 GB/s
# among A100s of a node; 200 Gbit/s of HDR InfiniBand a GPU.
NVLINK, INFINIBAND = Wire(3.4e-6, 235e9), Wire(9.6e-6, 25e9)
# 94.9 % of the bits are TCP's payload at an MTU of 1500. The latency is a guess.
ETHERNET = Wire(50e-6, 10e9 / 8 * 0.949)
ASSUMED_SPREAD = 0.03
WORLDS = [2**power for power in range(13)]
MARK = "<!-- below: bench/scaling.py --docs -->\n"
Machines = Mapping[str, tuple[Machine, Work, int]]
"""{name: (machine, work, samples of a rank)}"""


def machines(loopback: Wire, work: Work, samples: int, spread: float) -> Machines:
    a100 = Machine(ETHERNET, ETHERNET, 1, ASSUMED_SPREAD, True)
    eight = Machine(NVLINK, INFINIBAND, 8, ASSUMED_SPREAD, True)
    return {
        "this machine's core and loopback": (Machine(loopback, loopback, 1, spread, False, scatter=2), work, samples),
        "an A100 a node, 10 GbE": (a100, RESNET, IMAGES),
        "8 A100s a node, NVLink and HDR InfiniBand": (eight, RESNET, IMAGES),
    }


def compared(title: str, rows: Mapping[str, Mapping[int, tuple[float, float]]]) -> str:
    """Predictions and measurements. rows: {name: {ranks: (predicted seconds, measured seconds)}}."""
    lines, worlds = [], list(next(iter(rows.values())))
    for name, found in rows.items():
        cells = [
            f"{1e3 * guess:.1f} / {1e3 * took:.1f} ({100 * (guess / took - 1):+.0f} %)"
            for guess, took in found.values()
        ]
        lines.append([name, *cells])
    return harness.table([f"{title}, ms predicted / measured", *(f"W = {size}" for size in worlds)], lines)


def constants(loopback: Wire, work: Work, spread: float, steps: int) -> str:
    rows = [
        ["loopback, a message", f"{1e6 * loopback.latency:.0f} us", "all-reduces of 2 ranks, 4 kB to 4 MB"],
        ["loopback, bandwidth", f"{loopback.bandwidth / 1e9:.2f} GB/s", ""],
        ["a step of the mlp without samples", f"{1e3 * work.fixed:.2f} ms", "batches of 64 and 128 on one core"],
        ["a sample", f"{1e6 * work.each:.0f} us", ""],
        ["spread of a step's logarithm", f"{spread:.3f}", f"the middle two thirds of {steps} steps"],
    ]
    return harness.table(["constant", "fitted", ""], rows)


def fitted_cable(latency: float, bandwidth: float, wire: Wire) -> str:
    return (
        f"The cable's {1e3 * latency:g} ms and {8e-6 * bandwidth:g} Mbit/s are, to gloo's all-reduce of 2 ranks, "
        f"{1e3 * wire.latency:.2f} ms a message and {8e-6 * wire.bandwidth:.0f} Mbit/s.\n"
    )


def spread_of(steps: Sequence[float]) -> float:
    """The standard deviation of the logarithm, by the middle two thirds: one disturbed step is no distribution."""
    cuts = statistics.quantiles([math.log(step) for step in steps], n=100)
    return (cuts[83] - cuts[15]) / 2


def payoff(there: Machines) -> str:
    """A table: where each strategy stops paying on each machine."""
    rows = []
    for place, (machine, work, samples) in there.items():
        for name, step in STRATEGIES.items():
            values = [efficiency(step, work, machine, samples, ranks, True) for ranks in (8, 64, 512, 4096)]
            weak, strong = (stops(step, work, machine, samples, weak, WORLDS) for weak in (True, False))
            shown = ", ".join(f"{100 * value:.0f} %" if value else "-" for value in values)
            rows.append([place, name, shown, at(weak[0]), at(strong[0]), at(strong[1])])
    head = ["machine", "strategy", "efficiency at 8, 64, 512, 4096 ranks, a batch each", "below 50 %",
            "one batch shared out: below 50 %", "fastest"]  # fmt: skip
    return harness.table(head, rows)


def at(ranks: int | None) -> str:
    return f"W = {ranks}" if ranks else "not up to 4096"


def panels(there: Machines) -> list[dict[str, Any]]:
    """Efficiency over W: in the first row a batch each, in the second one batch shared out."""
    found = []
    for weak, label in ((True, "a batch each"), (False, "one batch shared out")):
        for place, (machine, work, samples) in there.items():
            lines = {
                name: [(ranks, efficiency(step, work, machine, samples, ranks, weak)) for ranks in WORLDS]
                for name, step in STRATEGIES.items()
            }
            axes = {
                "xscale": "log",
                "ylim": (0, 1.05),
                "xlabel": "ranks",
                "ylabel": f"efficiency, {label}",
                "title": place,
            }
            found.append({"lines": lines, **axes})
    return found


def write(out: Path, text: str, drawn: Sequence[Mapping[str, Any]], docs: bool) -> None:
    harness.save(out, "scaling", text, drawn)
    if docs:
        page = harness.ROOT / "docs" / "scaling.md"
        page.write_text(page.read_text().partition(MARK)[0] + MARK + "\n" + text.rstrip() + "\n")
        harness.plot(page.with_suffix(".png"), drawn, columns=3)
