"""What each gradient sync costs: bytes on the wire, time and loss, for the same model on the same samples.

python bench/compare.py [--worlds=2,4,8] [--syncs=all_reduce,ring,...] [--out=outputs/compare]

Bytes are counted, not computed: what the kernel says has left each rank's TCP sockets while it trained (TCP_INFO).
gloo's headers and the ranks' votes on stopping are included. The formula is shown beside it.
"""

from collections.abc import Callable
from typing import Any

import harness
from rank_costs import train_costs

BY_LOSS = "task._target_=support.models.ByLoss"  # a run's last number is its loss
WEIGHTS = 64, 10  # inputs and classes of the digits
RING = "2(W-1)/W", lambda w: 2 * (w - 1) / w, lambda w: 2 * (w - 1) / w
FORMULAS: dict[str, tuple[str, Callable[[int], float], Callable[[int], float]]] = {
    # what a rank sends in a step, in the gradients' bytes: the text, rank 0, the other ranks; w ranks
    "all_reduce": RING,
    "ring": RING,
    "parameter_server": ("W-1; others 1", lambda w: w - 1, lambda w: 1),
    "bf16": ("(W-1)/W", lambda w: (w - 1) / w, lambda w: (w - 1) / w),
}


def of_a_step(rank: dict[str, Any], key: str) -> float:
    """Seconds, or bytes sent, of a mean step after the first epoch."""
    laps = rank["laps"][1:]
    return sum(lap[key] for lap in laps) * len(rank["laps"]) / (rank["step_count"] * len(laps))


def measure(sync: str, size: int, width: int) -> list[object]:
    """One row of the table, from a training over `size` ranks."""
    overrides = [*harness.DDP, f"gradient_sync={sync}", BY_LOSS, "model=mlp", f"model.width={width}",
                 "trainer.batch_size=60", "trainer.epochs=4", "evaluation.every=4", "snapshot.every=4epochs",
                 "logging.every=1000"]  # fmt: skip
    ranks = harness.in_ranks(size, train_costs, *overrides)
    inputs, classes = WEIGHTS
    gradients = 4 * ((inputs + 1) * width + (width + 1) * width + (width + 1) * classes)  # bytes
    text, *formulas = FORMULAS[sync]
    sent = [of_a_step(rank, "sent") for rank in ranks]
    cells = []
    for counted, formula in zip((sent[0], max(sent[1:])), formulas, strict=True):
        cells += [f"{counted / 1e6:.3f} MB", f"{gradients * formula(size) / 1e6:.3f} MB"]
    milliseconds = 1000 * max(of_a_step(rank, "seconds") for rank in ranks)
    return [size, sync, text, *cells, f"{milliseconds:.1f}", f"{ranks[0]['loss']:.6f}"]


def main() -> None:
    arguments = harness.parser(__doc__, "compare")
    arguments.add_argument("--worlds", help="numbers of ranks: 2,4,8, or 2 with --quick")
    arguments.add_argument("--syncs", default=",".join(FORMULAS))
    asked = harness.parse(arguments)
    worlds = [int(size) for size in (asked.worlds or ("2" if asked.quick else "2,4,8")).split(",")]
    width = 256 if asked.quick else 1024  # of the two hidden layers
    rows = [measure(sync, size, width) for size in worlds for sync in asked.syncs.split(",")]
    head = ["ranks", "gradient_sync", "sent a step / gradients", "rank 0 sent", "by formula", "others sent",
            "by formula", "ms a step", "test loss"]  # fmt: skip
    text = harness.table(head, rows)
    print(text)
    harness.save(asked.out, "compare", text)


if __name__ == "__main__":
    main()
