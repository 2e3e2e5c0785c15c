"""What an option costs: each strategy, virtual ranks, and the profiler.

python bench/costs.py [--quick] [--rounds=3] [--only=strategies,virtual_ranks,profiler]

Whole runs on two ranks (virtual ranks: on one, too), in turns; of each the fastest round counts. Prints the tables of
docs/strategies.md, docs/promise.md and docs/profile.md.
"""

import statistics
from typing import Any

import harness
from rank_costs import train_costs

WIDE = ["model=mlp", "model.width=2048", "model.depth=3", "trainer.batch_size=256", "optimizer=adamw"]
STRATEGIES = {
    "`ddp`": ["strategy=ddp", "strategy._target_=measured.MeasuredDDP"],
    "`model_parallel`": ["strategy=model_parallel", "strategy._target_=measured_sharded.MeasuredModelParallel"],
    "`pipeline`, 1F1B": ["strategy=pipeline", "strategy._target_=measured_sharded.MeasuredPipeline"],
    "`fsdp`": ["strategy=fsdp", "strategy._target_=measured_sharded.MeasuredFSDP"],
}
STRATEGIES["`pipeline`, GPipe"] = [*STRATEGIES["`pipeline`, 1F1B"], "strategy.schedule=GPipe"]
STRATEGIES["`fsdp`, `reshard_after_forward=false`"] = [*STRATEGIES["`fsdp`"], "strategy.reshard_after_forward=false"]
DDP = ["strategy._target_=measured.MeasuredDDP"]
BATCH_NORM = {
    "`ddp`, `sync_bn=off`": [*DDP, "sync_bn=off"],
    "`ddp`, `sync_bn=on`": [*DDP, "sync_bn=on"],
    "`virtual_ranks`, 4 of them": ["strategy=virtual_ranks", "strategy._target_=measured_sharded.MeasuredVirtualRanks"],
}


def fastest_epoch(rank: dict[str, Any]) -> float:
    """Samples per second."""
    return max(lap["samples"] / lap["seconds"] for lap in rank["laps"])


def strategies(rounds: int, quick: bool) -> str:
    run = [*WIDE, f"trainer.max_steps={8 if quick else 20}"]
    measure = {name: lambda how=how: harness.in_ranks(2, train_costs, *run, *how) for name, how in STRATEGIES.items()}
    found = harness.interleave(measure, rounds)
    walls = {
        name: min(max(min(rank["walls"][2:]) for rank in ranks) for ranks in turns) for name, turns in found.items()
    }
    rows = []
    for name, turns in found.items():
        cpu = min(sum(statistics.median(rank["cpus"]) for rank in ranks) for ranks in turns)
        sizes = []
        for key in ("state", "resident"):
            sizes.append(
                " and ".join(
                    str(size) for size in sorted({round(rank[key] * 1e6 / 2**20) for rank in turns[0]}, reverse=True)
                )
            )
        times = [f"{walls[name] / walls['`ddp`']:.1f}", f"{1e3 * walls[name]:.0f}", f"{1e3 * cpu:.0f}"]
        rows.append([name, *times, *(f"{size} MiB" for size in sizes)])
    head = ["`strategy=`", "a step", "ms", "CPU ms, both ranks", "weights and moments on a rank", "resident"]
    return harness.table(head, rows)


def virtual_ranks(rounds: int, quick: bool) -> str:
    run = ["dataset.augment.pad=1", "trainer.batch_size=128", f"trainer.epochs={1 if quick else 4}"]
    measure = {
        (name, size): lambda how=how, size=size: fastest_epoch(harness.in_ranks(size, train_costs, *run, *how)[0])
        for name, how in BATCH_NORM.items()
        for size in (1, 2)
    }
    speeds = harness.interleave(measure, rounds)
    rows = []
    for name in BATCH_NORM:
        ratios = []
        for size in (1, 2):
            pairs = zip(speeds[name, size], speeds["`ddp`, `sync_bn=off`", size], strict=True)
            ratios.append(harness.spread([one / other for one, other in pairs]))
        rows.append([name, *ratios])
    return harness.table(["samples/s against `ddp`, `sync_bn=off`", "1 rank", "2 ranks"], rows)


def profiler(rounds: int, quick: bool) -> str:
    """CPU time, which other work on the machine does not stretch. One of three steps is measured; the next logs it."""
    run = ["strategy._target_=measured.MeasuredDDP", "+logger.measured._target_=measured.EpochRecorder", "sync_bn=off",
           f"trainer.epochs={2 if quick else 20}", "evaluation.every=20", "snapshot.every=20epochs",
           "profiler.enabled=true", "profiler.every=3", "profiler.trace_after=1000000"]  # fmt: skip
    rows = []
    for model in ("convnet", "mlp"):
        steps, more = [], []
        for _ in range(rounds):
            rank = harness.in_ranks(2, train_costs, *run, f"model={model}")[0]
            cpus = rank["cpus"]
            for at in (step - 4 for step in rank["profiled"] if 4 <= step < len(cpus) + 2):  # cpus[0] is of step 4
                steps.append(cpus[at + 2])
                more.append(cpus[at] + cpus[at + 1] - 2 * cpus[at + 2])
        step, extra = 1000 * statistics.median(steps), 1000 * statistics.median(more)
        rows.append([f"{model}, 2 ranks", f"{step:.2f} ms", f"{extra:.2f} ms", f"{extra / step / 101:.2%}"])
    head = ["profiler.enabled=true, CPU time", "a step", "more in a measured one", "of all, one in 101 measured"]
    return harness.table(head, rows)


PARTS = {"strategies": strategies, "virtual_ranks": virtual_ranks, "profiler": profiler}


def main() -> None:
    asked = harness.parse(harness.parser(__doc__, "costs", tuple(PARTS), rounds=3))
    texts = []
    for part in asked.only:
        texts.append(PARTS[part](asked.rounds, asked.quick))
        print(texts[-1], flush=True)
    harness.save(asked.out, "costs", "\n".join(texts))


if __name__ == "__main__":
    main()
