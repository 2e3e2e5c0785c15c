"""What an option costs: each strategy, virtual ranks, each gradient sync.

Whole commands on two ranks (virtual ranks: on one, too; gradient syncs: on 2, 4 and 8), in turns; of each the fastest
round counts. `gradient_sync` counts bytes: what the kernel says has left each rank's TCP sockets while it trained
(TCP_INFO), gloo's headers and the exchanges included. `taskset -c 0` gives every rank one thread.
"""

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import step_seconds

WIDE = ["model=mlp", "model.width=2048", "model.depth=3", "trainer.batch_size=256", "optimizer=adamw"]
STRATEGIES = {
    "`ddp`": [],
    "`model_parallel`": ["strategy=model_parallel", "strategy.devices=2"],
    "`pipeline`, 1F1B": ["strategy=pipeline", "strategy.micro_batches=4", "strategy.schedule=1F1B"],
    "`pipeline`, GPipe": ["strategy=pipeline", "strategy.micro_batches=4", "strategy.schedule=GPipe"],
    "`fsdp`": ["strategy=fsdp"],
    "`fsdp`, `reshard_after_forward=false`": ["strategy=fsdp", "strategy.reshard_after_forward=false"],
}
WITHOUT_SYNC = "`ddp`, `sync_bn=off`"
BATCH_NORM = {
    WITHOUT_SYNC: ["sync_bn=off"],
    "`ddp`, `sync_bn=on`": ["sync_bn=on"],
    "`virtual_ranks`, 4 of them": ["strategy=virtual_ranks", "strategy.count=4"],
}
RING = "2(W-1)/W", lambda w: 2 * (w - 1) / w, lambda w: 2 * (w - 1) / w
FORMULAS: dict[str, tuple[str, Callable[[int], float], Callable[[int], float]]] = {
    # what a rank sends in a step, in the gradients' bytes: the text, rank 0, the other ranks; w ranks
    "all_reduce": RING,
    "ring": RING,
    "parameter_server": ("W-1; others 1", lambda w: w - 1, lambda w: 1),
    "bf16": ("(W-1)/W", lambda w: (w - 1) / w, lambda w: (w - 1) / w),
}


def strategies(place: Path, rounds: int, quick: bool) -> str:
    run = [*WIDE, f"trainer.max_steps={8 if quick else 20}"]
    measure = {name: partial(harness.trained, 2, *run, *how) for name, how in STRATEGIES.items()}
    walls, rows = dict[str, float](), []
    for name, turns in harness.interleave(measure, rounds).items():
        walls[name] = 1e3 * min(max(min(step_seconds(rank, 0)) for rank in ranks) for ranks in turns)
        cpu = 1e3 * min(sum(statistics.median(step_seconds(rank, 1)) for rank in ranks) for ranks in turns)
        states = sorted({round(rank["state"] / 2**20) for rank in turns[0]}, reverse=True)
        state = " and ".join(map(str, states)) + " MiB"
        rows.append([name, f"{walls[name] / walls['`ddp`']:.1f}", f"{walls[name]:.0f}", f"{cpu:.0f}", state])
    return harness.table(["`strategy=`", "a step", "ms", "CPU ms, both ranks", "weights and moments on a rank"], rows)


def virtual_ranks(place: Path, rounds: int, quick: bool) -> str:
    """Samples/s by the clock, of the fastest epoch, and by the CPU time of all ranks, of the cheapest epoch."""
    augment = "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1}"
    run = [augment, "trainer.batch_size=128", f"trainer.epochs={1 if quick else 12}"]

    def speeds(size: int, how: list[str]) -> tuple[float, float]:
        epochs = list(zip(*(rank["training"] for rank in harness.trained(size, *run, *how)), strict=True))
        clock = max(laps[0]["samples"] / laps[0]["seconds"] for laps in epochs)
        return clock, max(laps[0]["samples"] / sum(lap["cpu"] for lap in laps) for laps in epochs)

    rows: dict[str, list[str]] = {name: [name] for name in BATCH_NORM}
    for size in (1, 2):
        ways = {name: partial(speeds, size, how) for name, how in BATCH_NORM.items()}
        found = {name: list(zip(*turns, strict=True)) for name, turns in harness.interleave(ways, rounds).items()}
        for name, row in rows.items():
            row += map(harness.ratios, found[name], found[WITHOUT_SYNC])
    head = [f"{ranks}, by {clock}" for ranks in ("1 rank", "2 ranks") for clock in ("clock", "CPU time")]
    return harness.table([f"samples/s against {WITHOUT_SYNC}", *head], list(rows.values()))


def gradient_sync(place: Path, rounds: int, quick: bool) -> str:
    """Bytes are counted, so one round tells."""
    width = 256 if quick else 1024  # of the two hidden layers
    gradients = 4 * ((64 + 1) * width + (width + 1) * width + (width + 1) * 10)  # bytes, of the digits
    run = ["model=mlp", f"model.width={width}", "trainer.batch_size=60", "trainer.epochs=4", "evaluation.every=4",
           "snapshot.every=4epochs", "logging.every=1000"]  # fmt: skip
    rows = []
    for size, sync in itertools.product((2,) if quick else (2, 4, 8), FORMULAS):
        ranks = harness.trained(size, *run, f"gradient_sync={sync}")
        text, *formulas = FORMULAS[sync]
        first, *others = (of_a_step(rank, "sent") for rank in ranks)
        row = [size, sync, text]
        for counted, formula in zip((first, max(others)), formulas, strict=True):
            row += [f"{counted / 1e6:.3f} MB", f"{gradients * formula(size) / 1e6:.3f} MB"]
        milliseconds = 1000 * max(of_a_step(rank, "seconds") for rank in ranks)
        rows.append([*row, f"{milliseconds:.1f}", f"{ranks[0]['loss']:.6f}"])
    head = ["ranks", "gradient_sync", "sent a step / gradients", "rank 0 sent", "by formula", "others sent",
            "by formula", "ms a step", "test loss"]  # fmt: skip
    return harness.table(head, rows)


def of_a_step(rank: dict[str, Any], key: str) -> float:
    """Seconds, or bytes sent, of a mean step after the first epoch."""
    laps = rank["training"][1:]
    return sum(lap[key] for lap in laps) * len(rank["training"]) / (len(rank["steps"]) * len(laps))


if __name__ == "__main__":
    parts = {part.__name__: part for part in (strategies, virtual_ranks, gradient_sync)}
    harness.run_parts(__doc__, "costs", 3, **parts)
