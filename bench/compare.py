"""What each gradient sync costs: bytes on the wire, time and loss, for the same model on the same samples.

python bench/compare.py [--worlds=2,4,8] [--syncs=all_reduce,ring,...] [--width=1024] [--out=outputs/compare]

Bytes are counted, not computed: what the kernel says has left each rank's TCP sockets while it trained (TCP_INFO).
gloo's headers and the ranks' votes on stopping are included. The formula is shown beside it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import harness
from rank_costs import train_costs

SYNC_EVERY = 8  # steps between two averages of local_sgd: a divisor of an epoch's 24
WEIGHTS = 64, 10  # inputs and classes of the digits
FORMULAS: dict[str, tuple[str, Callable[[int], float], Callable[[int], float]]] = {
    # what a rank sends in a step, in the gradients' bytes: the text, rank 0, the other ranks; w ranks
    "all_reduce": ("2(W-1)/W", lambda w: 2 * (w - 1) / w, lambda w: 2 * (w - 1) / w),
    "ring": ("2(W-1)/W", lambda w: 2 * (w - 1) / w, lambda w: 2 * (w - 1) / w),
    "parameter_server": ("W-1; others 1", lambda w: w - 1, lambda w: 1),
    "bf16": ("(W-1)/W", lambda w: (w - 1) / w, lambda w: (w - 1) / w),
    "local_sgd": (
        f"2(W-1)/W/{SYNC_EVERY}",
        lambda w: 2 * (w - 1) / w / SYNC_EVERY,
        lambda w: 2 * (w - 1) / w / SYNC_EVERY,
    ),
}


def of_a_step(rank: dict[str, Any], key: str) -> float:
    """Seconds, or bytes sent, of a mean step after the first epoch."""
    laps = rank["laps"][1:]
    return sum(lap[key] for lap in laps) * len(rank["laps"]) / (rank["step_count"] * len(laps))


def measure(sync: str, size: int, width: int) -> dict[str, Any]:
    """One row of the table, from a training over `size` ranks."""
    overrides = [f"gradient_sync={sync}", "strategy._target_=measured.MeasuredDDP", "objective=test/loss", "model=mlp",
                 f"model.width={width}", "trainer.batch_size=60", "trainer.epochs=4", "evaluation.every=4",
                 "snapshot.every=4epochs", "logging.every=1000"]  # fmt: skip
    if sync == "local_sgd":
        overrides.append(f"gradient_sync.sync_every={SYNC_EVERY}")
    rank_zero, *others = harness.in_ranks(size, train_costs, *overrides)
    inputs, classes = WEIGHTS
    gradients = 4 * ((inputs + 1) * width + (width + 1) * width + (width + 1) * classes)  # bytes
    text, of_rank_zero, of_others = FORMULAS[sync]
    return {
        "ranks": size,
        "sync": sync,
        "formula": text,
        "rank 0": of_a_step(rank_zero, "sent"),
        "rank 0 by formula": gradients * of_rank_zero(size),
        "others": max(of_a_step(other, "sent") for other in others),
        "others by formula": gradients * of_others(size),
        "ms": 1000 * max(of_a_step(rank, "seconds") for rank in (rank_zero, *others)),
        "loss": rank_zero["loss"],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["ranks", "gradient_sync", "sent a step / gradients", "rank 0 sent", "by formula", "others sent",
            "by formula", "ms a step", "test loss"]  # fmt: skip
    lines = []
    for row in rows:
        keys = ("rank 0", "rank 0 by formula", "others", "others by formula")
        sizes = [f"{row[key] / 1e6:.3f} MB" for key in keys]
        lines.append([row["ranks"], row["sync"], row["formula"], *sizes, f"{row['ms']:.1f}", f"{row['loss']:.6f}"])
    return harness.table(head, lines)


def panels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for key, scale, label in (("rank 0", 1e-6, "MB that rank 0 sends in a step"), ("ms", 1, "ms a step")):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            lines.setdefault(row["sync"], []).append((row["ranks"], scale * row[key]))
        found.append({"lines": lines, "xlabel": "ranks", "ylabel": label, "ylim": (0, None)})
    return found


def main() -> None:
    arguments = harness.parser(__doc__, "compare")
    arguments.add_argument("--worlds", help="numbers of ranks: 2,4,8, or 2 with --quick")
    arguments.add_argument("--syncs", default=",".join(FORMULAS))
    arguments.add_argument("--width", type=int, help="of the two hidden layers: 1024, or 64 with --quick")
    asked = harness.parse(arguments)
    worlds = [int(size) for size in (asked.worlds or ("2" if asked.quick else "2,4,8")).split(",")]
    width = asked.width or (64 if asked.quick else 1024)
    rows = [measure(sync, size, width) for size in worlds for sync in asked.syncs.split(",")]
    print(table(rows))
    harness.save(asked.out, "compare", table(rows), panels(rows))


if __name__ == "__main__":
    main()
