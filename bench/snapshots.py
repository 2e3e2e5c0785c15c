"""What a sharded snapshot of 1 GB costs two fsdp ranks: memory, and time of the training thread.

python bench/snapshots.py [--quick] [--out=outputs/snapshots]

A multilayer perceptron under AdamW trains on two ranks, each on a core of its own. After every `CYCLE` steps each rank
saves its shard, and training goes on while a thread writes it. The stall is what `save` takes, in CPU time and in wall
time, each against a step. A step's CPU time is that of the training thread, without gloo's threads, so that share is
too large rather than too small. Wall times mean something on an idle machine only. Memory is the peak of resident
memory from a snapshot to the next one, less the peak of the steps before the first.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import harness

from lockstep.snapshots.files import list_snapshots
from lockstep.training.callbacks import Callback

CYCLE, WARM_UP, SAVES = 4, 2, 4
RUN = [
    "strategy=fsdp", "snapshot.keep_last=1", "model=mlp", "model.depth=6", "optimizer=adamw",
    "dataset=random", "dataset.samples=6400", "trainer.batch_size=64",
    f"trainer.max_steps={WARM_UP + CYCLE * SAVES + 1}",
]  # fmt: skip


def reset_peak() -> None:
    """Let the peak of resident memory begin again with what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


class Watch(Callback):
    """Called after every step: reads clocks and memory, and saves when it is time."""

    def __init__(self, snapshots: Any) -> None:
        self.snapshots, self.count, self.shard = snapshots, 0, 0.0
        self.found: dict[str, list[float]] = {"step cpu": [], "step wall": [], "cpu": [], "wall": [], "peak": []}
        self.start()

    def start(self) -> None:
        self.clocks = time.thread_time(), time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.thread_time(), time.perf_counter()
        for name, late, early in zip(("cpu", "wall"), now, self.clocks, strict=True):
            self.found[what + name].append(late - early)
        self.start()

    def on_step_end(self, run: Any) -> None:
        from record import memory

        self.lap("step ")
        self.count += 1
        place = (self.count - WARM_UP) % CYCLE
        if self.count == WARM_UP:
            reset_peak()
        elif self.count > WARM_UP and place == 0:
            self.snapshots.newest()  # waits
            self.found["peak"].append(memory()["rss"])
            reset_peak()
            self.snapshots.world.barrier()
            self.start()
            self.snapshots.save()
            self.lap("")
        self.start()


def costs(config: Any) -> dict[str, Any]:
    """Run on each rank: what `Watch` found, in seconds and MB, and the MB of the rank's shard."""
    from rank_costs import built, train_an_epoch

    harness.pin_to_core()
    with built(config) as (run, snapshots):
        run.callbacks = [watch := Watch(snapshots)]
        train_an_epoch(run, snapshots)
        name = f"shard-{run.world.rank + 1:05d}-*"
        sizes = [sum(file.stat().st_size for file in path.glob(name)) for path in list_snapshots(snapshots.folder)]
        return {**watch.found, "shard": max(sizes) / 1e6}


def rows(rank: dict[str, Any]) -> list[list[object]]:
    """The first snapshot makes the group of the writing threads, too."""
    step = {name: statistics.median(rank[f"step {name}"][WARM_UP:]) for name in ("cpu", "wall")}
    found = []
    for name, chosen in (("the first", slice(0, 1)), ("later ones", slice(1, None))):
        cpu, wall = (statistics.median(rank[kind][chosen]) for kind in ("cpu", "wall"))
        before, *while_writing = rank["peak"]
        over = (max(while_writing[chosen]) - before) / rank["shard"]
        found.append([name, f"{1e3 * cpu:.0f} of {1e3 * step['cpu']:.0f}", f"{cpu / step['cpu']:.1%}",
                      f"{wall / step['wall']:.1%}", f"{rank['shard']:.0f}", f"{over:.2f}"])  # fmt: skip
    return found


def main() -> None:
    asked = harness.parse(harness.parser(__doc__, "snapshots"))
    ranks = harness.in_ranks(2, costs, *RUN, f"model.width={512 if asked.quick else 4096}")
    head = ["rank", "snapshot", "CPU ms, of a step's", "share", "share by wall time", "MB of its shard"]
    lines = [[number, *line] for number, rank in enumerate(ranks) for line in rows(rank)]
    text = harness.table([*head, "peak memory, in shards"], lines)
    print(text)
    harness.save(asked.out, "snapshots", text)


if __name__ == "__main__":
    main()
