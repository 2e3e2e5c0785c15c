"""Fits the constants of bench/step_time.py to this machine, checks its predictions, and predicts up to 4096 ranks.

python bench/scaling.py [--quick] [--rounds=5] [--docs] [--out=outputs/scaling]

Three checks. Collectives on cables (bench/cable.py) of 1 ms and 100 Mbit/s, where the network is measured and not two
cores. Whole runs of a model that sleeps (bench/sleeper.py), on those cables: as many hosts as ranks. And runs of a real
model on loopback, whose ranks share this machine's cores. The cables need root. --docs also writes to docs/.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import cable
import harness
import scaling_tables
import step_time
import torch
import torch.distributed as dist
from rank_costs import train_costs
from step_time import Machine, Wire, Work
from torch import Tensor

LATENCY, BANDWIDTH = 1e-3, 100e6 / 8  # of a cable
SIZES = (4_000, 40_000, 400_000, 4_000_000)  # bytes
SYNC_EVERY = 4  # steps between two averages of local SGD
DDP = "strategy._target_=measured.MeasuredDDP"
SLEEPER = ["dataset=random", "dataset.features=256", "dataset.samples=4096", "model=mlp", "model.width=256",
           "model._target_=sleeper.sleeper", "model.depth=8", "~model.dropout", "+model.seconds=0.03",
           "trainer.batch_size_per_rank=8", "logging.every=1000", "objective=test/loss"]  # fmt: skip
REAL = ["model=mlp", "model.width=1024", "model.depth=2", "trainer.batch_size_per_rank=128", "logging.every=1000",
        "gradient_sync=all_reduce", DDP]  # fmt: skip
BUCKETS = [DDP, "strategy.bucket_cap_mb=0.5"]
STEPS: dict[str, tuple[list[str], step_time.Step]] = {
    "DDP, all-reduce": ([*BUCKETS, "gradient_sync=all_reduce"], step_time.ddp),
    "DDP, bf16": ([*BUCKETS, "gradient_sync=bf16"], lambda *case: step_time.ddp(*case, shrink=2)),
    "ring, waited for": (
        [*BUCKETS, "gradient_sync=ring"],
        lambda *case: step_time.one_by_one(*case, way=step_time.ring),
    ),
    "parameter server": (
        [*BUCKETS, "gradient_sync=parameter_server"],
        lambda *case: step_time.one_by_one(*case, way=step_time.server),
    ),
    f"local SGD, every {SYNC_EVERY}": (
        [*BUCKETS, "gradient_sync=local_sgd", f"gradient_sync.sync_every={SYNC_EVERY}"],
        lambda *case: step_time.local_sgd(*case, every=SYNC_EVERY),
    ),
    "FSDP": (["strategy=fsdp", "strategy._target_=measured_sharded.MeasuredFSDP"], step_time.fsdp),
    "pipeline": (["strategy=pipeline", "strategy._target_=measured_sharded.MeasuredPipeline"], step_time.pipeline),
}
WAYS: dict[str, step_time.Collective] = {
    "all-reduce": step_time.ring,
    "ring_sum": step_time.ring,
    "tree_sum": step_time.tree,
    "server_sum": step_time.server,
    "all-gather": step_time.gather,
    "reduce-scatter": step_time.ring,  # gloo makes a whole all-reduce of it
}


def on_host(hosts: Sequence[str] | None, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) on this rank's host, or without hosts on a core of this machine."""
    if hosts:
        cable.enter(hosts[int(os.environ["RANK"])])
        os.environ.update(MASTER_ADDR="10.77.0.10", GLOO_SOCKET_IFNAME="eth0")
    harness.pin_to_core()
    return function(*args)


def tree_sum(vector: Tensor, rank: int, size: int) -> None:
    """Sum `vector` over `size` ranks, a power of two, in place: halves are exchanged, added and exchanged again."""
    from torch.distributed import P2POp, irecv, isend

    from lockstep.strategies.gradient_sync.point_to_point import exchange

    part, halved, distance = vector, [], size // 2
    while distance:
        low, high = part.tensor_split(2)
        mine, theirs = (high, low) if rank & distance else (low, high)
        arrived = torch.empty_like(mine)
        exchange(P2POp(irecv, arrived, rank ^ distance), P2POp(isend, theirs, rank ^ distance))
        halved.append((mine.add_(arrived), theirs, rank ^ distance))
        part, distance = mine, distance // 2
    for mine, theirs, peer in reversed(halved):
        exchange(P2POp(irecv, theirs, peer), P2POp(isend, mine, peer))


def time_collectives(rounds: int) -> dict[tuple[str, int], float]:
    """In a rank: {(collective, bytes): seconds of the fastest round}."""
    from lockstep.distributed.world import World, init_distributed
    from lockstep.strategies.gradient_sync.parameter_server import server_sum
    from lockstep.strategies.gradient_sync.ring import ring_sum

    def share(vector: Tensor, world: World) -> Tensor:
        return vector.chunk(world.size)[world.rank].clone()

    with init_distributed("gloo", 120) as world:
        place = world.rank, world.size
        run: dict[str, Callable[[Tensor], Any]] = {
            "all-reduce": dist.all_reduce,
            "ring_sum": lambda vector: ring_sum(vector, *place),
            "tree_sum": lambda vector: tree_sum(vector, *place),
            "server_sum": lambda vector: server_sum(vector, *place),
            "all-gather": lambda vector: dist.all_gather_into_tensor(vector, share(vector, world)),
            "reduce-scatter": lambda vector: dist.reduce_scatter_tensor(share(vector, world), vector),
        }
        found = {}
        for name, size in itertools.product(run, SIZES):
            seconds = []
            for _ in range(rounds + 1):  # the first one makes the connections
                vector = torch.zeros(size // 4)
                world.barrier()
                began = time.perf_counter()
                run[name](vector)
                seconds.append(time.perf_counter() - began)
            found[name, size] = min(seconds[1:])
        return found


def in_ranks(size: int, function: Callable[..., Any], *args: Any, wired: bool = False) -> list[Any]:
    """What the ranks of a world of `size` return, on cables or on this machine's cores."""
    from support.worlds import in_world

    with cable.cables(size, LATENCY, BANDWIDTH) if wired else nullcontext() as hosts:
        return in_world(size, on_host, hosts, function, *args, limit=900)


def run_steps(size: int, steps: int, *overrides: str, wired: bool = False) -> tuple[float, float, list[float]]:
    """(mean seconds of a step, CPU seconds of a median one, the seconds of all) of the rank that takes longest."""
    from support.configs import composed

    with tempfile.TemporaryDirectory() as folder:
        cfg = composed(f"run_dir={folder}", "trainer.epochs=1000", f"trainer.max_steps={steps + 3}", *overrides)
        ranks = in_ranks(size, train_costs, cfg, wired=wired)
    slowest = max(ranks, key=lambda rank: sum(rank["walls"]))
    return statistics.fmean(slowest["walls"]), statistics.median(slowest["cpus"]), slowest["walls"]


def fit_wire(times: dict[int, float], ranks: int, cores: int | None) -> Wire:
    """The Wire whose ring takes `times` {bytes: seconds} on `ranks` ranks: least squares of the relative error."""
    rows = [(2 * (ranks - 1) / took, 2 * (ranks - 1) / ranks * size / took) for size, took in times.items()]
    ll, lb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    l1, b1 = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = ll * bb - lb * lb
    return Wire(max((l1 * bb - b1 * lb) / determinant, 0.0), determinant / (b1 * ll - l1 * lb), cores)


def check_collectives(worlds: Sequence[int], rounds: int, wired: bool) -> tuple[Wire, str]:
    """The Wire fitted to the all-reduces of two ranks, and a table: what it predicts, and what collectives took."""
    times: dict[int, dict[tuple[str, int], float]] = {}
    for size in worlds:
        ranks = in_ranks(size, time_collectives, rounds, wired=wired)
        times[size] = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    cores = None if wired else len(os.sched_getaffinity(0))
    wire = fit_wire({size: times[2]["all-reduce", size] for size in SIZES}, 2, cores)
    rows = {
        f"{name}, {size / 1e6:g} MB": {
            ranks: (WAYS[name](wire, size, ranks), times[ranks][name, size]) for ranks in worlds
        }
        for name, size in times[2]
    }
    return wire, scaling_tables.compared("on cables" if wired else "on loopback", rows)


def check_steps(worlds: Sequence[int], wire: Wire, steps: int, names: Sequence[str]) -> str:
    """A table: runs of the sleeping model on cables. Its compute time is one rank's; the rest shares the cores."""
    alone, busy, _ = run_steps(1, steps, *SLEEPER, DDP)
    layers = [4.0 * (256 * 256 + 256)] * 7 + [4.0 * 257]
    filled = step_time.buckets(layers[::-1], 0.5 * 2**20, 2**20)
    rows: dict[str, dict[int, tuple[float, float]]] = {}
    for name, ranks in itertools.product(names, worlds):
        overrides, formula = STEPS[name]
        waits = max(0, ranks / len(os.sched_getaffinity(0)) - 1) * busy
        work = Work(0.0, (alone + waits) / 8, filled, 8, 8, 4, 4 * 256)
        guess = formula(work, Machine(wire, wire, 1, 0.0, formula is not step_time.fsdp, scatter=2), 8, ranks)
        # The ranks of a pipeline read one batch together.
        shared = [f"trainer.batch_size_per_rank={8 * ranks}"] if name == "pipeline" else []
        took = run_steps(ranks, steps, *SLEEPER, *overrides, *shared, wired=True)[0]
        rows.setdefault(name, {})[ranks] = guess, took
    return scaling_tables.compared(f"a step of {1e3 * alone:.0f} ms on cables", rows)


def check_real(worlds: Sequence[int], wire: Wire, steps: int) -> tuple[Work, float, str]:
    """The Work of a real model on one core, its spread, and a table: its steps on ranks that share the cores."""
    walls = run_steps(1, 5 * steps, *REAL)[2]
    median, half = (
        statistics.median(walls),
        statistics.median(run_steps(1, steps, *REAL, "trainer.batch_size_per_rank=64")[2]),
    )
    weights = 65 * 1024 + 1025 * 1024 + 1025 * 10
    each = max((median - half) / 64, 0.0)
    work = Work(max(median - 128 * each, 0.0), each, (4.0 * weights,), 3, 3, 4, 4 * 1024)
    row = {}
    for ranks in worlds:
        guess = wire.ranks_per_core(ranks) * median + step_time.ring(wire, work.size, ranks)
        row[ranks] = guess, statistics.median(run_steps(ranks, steps, *REAL)[2])
    table = scaling_tables.compared("on shared cores", {"an mlp of 1.1 million weights": row})
    return work, scaling_tables.spread_of(walls), table


def main() -> None:
    arguments = harness.parser(__doc__, "scaling", rounds=5)
    arguments.add_argument("--docs", action="store_true", help="put tables and plot into docs/")
    asked = harness.parse(arguments)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hosts on cables have no names, which c10d would report each time
    worlds, rounds = ((2,), 3) if asked.quick else ((2, 4, 8), asked.rounds)
    steps = SYNC_EVERY if asked.quick else SYNC_EVERY * -(-3 * rounds // 5)
    parts = []

    def show(part: str) -> None:
        print(part, flush=True)
        parts.append(part)

    loopback, collectives = check_collectives(worlds, rounds, wired=False)
    work, spread, real = check_real(worlds, loopback, 4 * steps)
    for part in (scaling_tables.constants(loopback, work, spread, 20 * steps), collectives, real):
        show(part)
    if os.geteuid() == 0 and os.path.exists("/dev/net/tun"):
        wire, collectives = check_collectives(worlds, rounds, wired=True)
        show(scaling_tables.fitted_cable(LATENCY, BANDWIDTH, wire))
        show(collectives)
        show(check_steps(worlds, wire, steps, list(STEPS)[:2] if asked.quick else list(STEPS)))
    else:
        show("(Nothing measured on cables: they need root and /dev/net/tun.)\n")
    there = scaling_tables.machines(replace(loopback, cores=None), work, 128, spread)
    show(scaling_tables.payoff(there))
    scaling_tables.write(asked.out, "\n".join(parts), scaling_tables.panels(there), asked.docs)


if __name__ == "__main__":
    main()
