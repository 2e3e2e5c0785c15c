"""What an option costs: each strategy, virtual ranks, and samples that are held out for validation.

python bench/costs.py [--quick] [--rounds=3] [--only=strategies,virtual_ranks,validation]

Whole runs on two ranks (virtual ranks and validation: on one, too), in turns; of each the fastest round counts. Prints
the tables of docs/strategies.md and docs/promise.md. `validation` is about the training of an epoch, without its
evaluation: training samples a second, with a tenth of MNIST held out and with none. `taskset -c 0` before the command
gives every rank one thread.
"""

import statistics
from typing import Any

import harness
from harness import DDP, MEASURED_STEPS
from rank_costs import train_costs

WIDE = ["model=mlp", "model.width=2048", "model.depth=3", "trainer.batch_size=256", "optimizer=adamw"]
PIPELINE = ["strategy=pipeline", "strategy.micro_batches=4"]
MODEL_PARALLEL = ["strategy=model_parallel", "strategy.devices=2"]
VIRTUAL_RANKS = ["strategy=virtual_ranks", "strategy.count=4"]
STRATEGIES = {
    "`ddp`": DDP,
    "`model_parallel`": MODEL_PARALLEL,
    "`pipeline`, 1F1B": [*PIPELINE, "strategy.schedule=1F1B"],
    "`pipeline`, GPipe": [*PIPELINE, "strategy.schedule=GPipe"],
    "`fsdp`": ["strategy=fsdp"],
    "`fsdp`, `reshard_after_forward=false`": ["strategy=fsdp", "strategy.reshard_after_forward=false"],
}
BATCH_NORM = {
    "`ddp`, `sync_bn=off`": [*DDP, "sync_bn=off"],
    "`ddp`, `sync_bn=on`": [*DDP, "sync_bn=on"],
    "`virtual_ranks`, 4 of them": VIRTUAL_RANKS,
}


def strategies(rounds: int, quick: bool) -> str:
    run = [*WIDE, MEASURED_STEPS, f"trainer.max_steps={8 if quick else 20}"]
    measure = {name: lambda how=how: harness.in_ranks(2, train_costs, *run, *how) for name, how in STRATEGIES.items()}
    walls: dict[str, float] = {}
    rows = []
    for name, turns in harness.interleave(measure, rounds).items():
        walls[name] = 1e3 * min(max(min(rank["walls"][2:]) for rank in ranks) for ranks in turns)
        cpu = 1e3 * min(sum(statistics.median(rank["cpus"]) for rank in ranks) for ranks in turns)
        states = sorted({round(rank["state"] * 1e6 / 2**20) for rank in turns[0]}, reverse=True)
        state = " and ".join(map(str, states)) + " MiB"
        rows.append([name, f"{walls[name] / walls['`ddp`']:.1f}", f"{walls[name]:.0f}", f"{cpu:.0f}", state])
    return harness.table(["`strategy=`", "a step", "ms", "CPU ms, both ranks", "weights and moments on a rank"], rows)


def samples_per_second(size: int, *overrides: str) -> dict[str, float]:
    """By the clock, of the fastest epoch, and by the CPU time of all ranks, of the cheapest epoch."""
    ranks: list[dict[str, Any]] = harness.in_ranks(size, train_costs, *overrides)
    epochs = list(zip(*(rank["laps"] for rank in ranks), strict=True))
    return {
        "clock": max(laps[0]["samples"] / laps[0]["seconds"] for laps in epochs),
        "CPU time": max(laps[0]["samples"] / sum(lap["cpu"] for lap in laps) for laps in epochs),
    }


def virtual_ranks(rounds: int, quick: bool) -> str:
    augment = "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1}"
    run = [augment, MEASURED_STEPS, "trainer.batch_size=128", f"trainer.epochs={1 if quick else 12}"]
    measure = {
        (name, size): lambda how=how, size=size: samples_per_second(size, *run, *how)
        for name, how in BATCH_NORM.items()
        for size in (1, 2)
    }
    speeds = harness.interleave(measure, rounds)
    rows = []
    columns = [(size, by) for size in (1, 2) for by in ("clock", "CPU time")]
    for name in BATCH_NORM:
        row = [name]
        for size, by in columns:
            pairs = zip(speeds[name, size], speeds["`ddp`, `sync_bn=off`", size], strict=True)
            row.append(harness.spread([one[by] / other[by] for one, other in pairs]))
        rows.append(row)
    head = [f"{size} {'rank' if size == 1 else 'ranks'}, by {by}" for size, by in columns]
    return harness.table(["samples/s against `ddp`, `sync_bn=off`", *head], rows)


def validation(rounds: int, quick: bool) -> str:
    run = [*DDP, f"dataset={'digits' if quick else 'mnist'}", "trainer.batch_size=128", "trainer.epochs=3"]
    measure = {
        (held_out, size): lambda held_out=held_out, size=size: samples_per_second(
            size, *run, f"loader.validation={held_out}"
        )
        for held_out in ("null", "0.1")
        for size in (1, 2)
    }
    speeds = harness.interleave(measure, rounds)
    columns = [(size, by) for size in (1, 2) for by in ("clock", "CPU time")]
    pairs = [zip(speeds["0.1", size], speeds["null", size], strict=True) for size, _ in columns]
    ratios = [[one[by] / other[by] for one, other in pair] for (_, by), pair in zip(columns, pairs, strict=True)]
    head = [f"{size} {'rank' if size == 1 else 'ranks'}, by {by}" for size, by in columns]
    row = ["`loader.validation=0.1`", *map(harness.spread, ratios)]
    return harness.table(["samples/s against `loader.validation=null`", *head], [row])


def main() -> None:
    parts = {"strategies": strategies, "virtual_ranks": virtual_ranks, "validation": validation}
    asked = harness.parse(harness.parser(__doc__, "costs", tuple(parts), rounds=3))
    text = "\n".join(parts[part](asked.rounds, asked.quick) for part in asked.only)
    print(text)
    harness.save(asked.out, "costs", text)


if __name__ == "__main__":
    main()
