"""What an option costs: each strategy, virtual ranks, held-out samples, each gradient sync.

python bench/costs.py [--quick] [--rounds=3] [--only=strategies,virtual_ranks,validation,gradient_sync]

Whole runs on two ranks (virtual ranks and validation: on one, too; gradient syncs: on 2, 4 and 8), in turns; of each
the fastest round counts. Prints the tables of docs/strategies.md and docs/promise.md. `validation` is about the
training of an epoch, without its evaluation. `gradient_sync` counts bytes: what the kernel says has left each rank's
TCP sockets while it trained (TCP_INFO), gloo's headers and the exchanges included. `taskset -c 0` gives every rank one
thread.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
from harness import DDP, MEASURED_STEPS

WIDE = ["model=mlp", "model.width=2048", "model.depth=3", "trainer.batch_size=256", "optimizer=adamw"]
PIPELINE = ["strategy=pipeline", "strategy.micro_batches=4"]
STRATEGIES = {
    "`ddp`": DDP,
    "`model_parallel`": ["strategy=model_parallel", "strategy.devices=2"],
    "`pipeline`, 1F1B": [*PIPELINE, "strategy.schedule=1F1B"],
    "`pipeline`, GPipe": [*PIPELINE, "strategy.schedule=GPipe"],
    "`fsdp`": ["strategy=fsdp"],
    "`fsdp`, `reshard_after_forward=false`": ["strategy=fsdp", "strategy.reshard_after_forward=false"],
}
BATCH_NORM = {
    "`ddp`, `sync_bn=off`": [*DDP, "sync_bn=off"],
    "`ddp`, `sync_bn=on`": [*DDP, "sync_bn=on"],
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


def train_costs(config: Any) -> dict[str, Any]:
    """In each rank of a fresh world: a whole training, with the callback of bench/measured.py.

    walls, cpus: seconds of each step after the second, by the clock and of CPU. first: seconds to the end of the first
    step. loss: the objective. laps: of the epochs' training. step_count: steps. state: MB of weights and optimizer
    state on this rank. The rest is memory at the end, see bench/record.py.
    """
    from measured import RECORD
    from record import memory
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from support.worlds import train

    optimizers: list[Any] = []
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: optimizers or optimizers.append(optimizer))
    began = time.time()
    loss = train(config)
    pairs = list(itertools.pairwise(RECORD.steps[2:]))
    return {
        "walls": [late[0] - early[0] for early, late in pairs],
        "cpus": [late[1] - early[1] for early, late in pairs],
        "first": (RECORD.first_step or began) - began,
        "loss": loss,
        "laps": RECORD.laps["training"],
        "step_count": len(RECORD.steps),
        "state": sum(map(state_bytes, optimizers)) / 1e6,
        **memory(),
    }


def state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's parameters and state on this rank."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    held = [*weights, *(value for state in optimizer.state.values() for value in state.values())]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in held)


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


def speeds_against(first: str, ways: dict[str, list[str]], run: list[str], rounds: int) -> str:
    """A table: samples/s of each of `ways` over those of `first`, on one rank and on two, by the clock and by CPU."""
    measure = {
        (name, size): lambda how=how, size=size: samples_per_second(size, *run, *how)
        for name, how in ways.items()
        for size in (1, 2)
    }
    speeds, rows = harness.interleave(measure, rounds), []
    columns = [(size, by) for size in (1, 2) for by in ("clock", "CPU time")]
    for name in ways:
        pairs = [zip(speeds[name, size], speeds[first, size], strict=True) for size, _ in columns]
        ratios = [[one[by] / other[by] for one, other in pair] for (_, by), pair in zip(columns, pairs, strict=True)]
        rows.append([name, *map(harness.spread, ratios)])
    head = [f"{size} {'rank' if size == 1 else 'ranks'}, by {by}" for size, by in columns]
    return harness.table([f"samples/s against {first}", *head], rows)


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
    return speeds_against("`ddp`, `sync_bn=off`", BATCH_NORM, run, rounds)


def validation(rounds: int, quick: bool) -> str:
    run = [*DDP, f"dataset={'digits' if quick else 'mnist'}", "trainer.batch_size=128", "trainer.epochs=3"]
    ways = {f"`loader.validation={value}`": [f"loader.validation={value}"] for value in ("null", "0.1")}
    return speeds_against("`loader.validation=null`", ways, run, rounds)


def gradient_sync(rounds: int, quick: bool) -> str:
    """Bytes are counted, so one round tells."""
    head = ["ranks", "gradient_sync", "sent a step / gradients", "rank 0 sent", "by formula", "others sent",
            "by formula", "ms a step", "test loss"]  # fmt: skip
    width = 256 if quick else 1024  # of the two hidden layers
    return harness.table(
        head, [sync_row(*case, width) for case in itertools.product((2,) if quick else (2, 4, 8), FORMULAS)]
    )


def sync_row(size: int, sync: str, width: int) -> list[object]:
    run = [*DDP, f"gradient_sync={sync}", "task._target_=support.models.ByLoss", "model=mlp", f"model.width={width}",
           "trainer.batch_size=60", "trainer.epochs=4", "evaluation.every=4", "snapshot.every=4epochs",
           "logging.every=1000"]  # fmt: skip
    ranks = harness.in_ranks(size, train_costs, *run)
    gradients = 4 * ((64 + 1) * width + (width + 1) * width + (width + 1) * 10)  # bytes, of the digits
    text, *formulas = FORMULAS[sync]
    sent = [of_a_step(rank, "sent") for rank in ranks]
    cells = []
    for counted, formula in zip((sent[0], max(sent[1:])), formulas, strict=True):
        cells += [f"{counted / 1e6:.3f} MB", f"{gradients * formula(size) / 1e6:.3f} MB"]
    milliseconds = 1000 * max(of_a_step(rank, "seconds") for rank in ranks)
    return [size, sync, text, *cells, f"{milliseconds:.1f}", f"{ranks[0]['loss']:.6f}"]


def of_a_step(rank: dict[str, Any], key: str) -> float:
    """Seconds, or bytes sent, of a mean step after the first epoch."""
    laps = rank["laps"][1:]
    return sum(lap[key] for lap in laps) * len(rank["laps"]) / (rank["step_count"] * len(laps))


def main() -> None:
    parts = {part.__name__: part for part in (strategies, virtual_ranks, validation, gradient_sync)}
    asked = harness.parse(harness.parser(__doc__, "costs", tuple(parts), rounds=3))
    text = "\n".join(parts[part](asked.rounds, asked.quick) for part in asked.only)
    print(text)
    harness.save(asked.out, "costs", text)


if __name__ == "__main__":
    main()
