"""What each strategy costs on two ranks: a step's time, and the memory a rank holds.

python bench/strategies.py [--rounds=3]

Whole runs of src/train.py's own work() in turns, so that whatever else the machine does falls on all alike; of each the
fastest counts. Prints the table of docs/strategies.md.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

WIDE = ["model=mlp", "model.width=2048", "model.depth=3", "trainer.batch_size=256", "optimizer=adamw", "trainer.max_steps=20"]
CHOICES = {
    "`ddp`": ["strategy=ddp"],
    "`model_parallel`": ["strategy=model_parallel"],
    "`pipeline`, 1F1B": ["strategy=pipeline"],
    "`pipeline`, GPipe": ["strategy=pipeline", "strategy.schedule=GPipe"],
    "`fsdp`": ["strategy=fsdp"],
    "`fsdp`, `reshard_after_forward=false`": ["strategy=fsdp", "strategy.reshard_after_forward=false"],
}


def costs(cfg):
    """(fastest step in s, CPU time of a middling step in s, MiB of weights and optimizer state, resident MiB) of this rank."""
    import train
    from lockstep import loop

    update, walls, processors, held = loop.update, [], [], []

    def measured(run):
        update(run)
        walls.append(time.perf_counter())
        processors.append(time.process_time())
        state = [tensor for values in run.optimizer.state.values() for tensor in values.values()]
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (*run.model.parameters(), *state)]
        held[:] = [sum(tensor.nbytes for tensor in local) / 2**20, int(Path("/proc/self/statm").read_text().split()[1]) / 256]

    loop.update, sys.stdout = measured, open(os.devnull, "w")  # noqa: SIM115
    train.work(cfg)
    steps, busy = ([late - early for early, late in itertools.pairwise(times[4:])] for times in (walls, processors))
    return min(steps), statistics.median(busy), *held


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    rounds = options.parse_args().rounds
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"

    from conftest import in_world
    from test_configs import composed

    found = {name: [] for name in CHOICES}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for number, (name, overrides) in enumerate(CHOICES.items()):
                found[name].append(in_world(2, costs, composed(f"run_dir={folder}/{number}-{turn}", *WIDE, *overrides), limit=600))
    print("| `strategy=` | a step | ms | CPU ms, both ranks | weights and moments on a rank | resident |\n|---|---|---|---|---|---|")
    walls = {name: min(max(rank[0] for rank in ranks) for ranks in turns) for name, turns in found.items()}
    for name, turns in found.items():
        busy = min(sum(rank[1] for rank in ranks) for ranks in turns)
        held, resident = (" and ".join(str(size) for size in sorted({round(rank[place]) for rank in turns[0]}, reverse=True)) for place in (2, 3))
        print(f"| {name} | {walls[name] / walls['`ddp`']:.1f} | {1e3 * walls[name]:.0f} | {1e3 * busy:.0f} | {held} MiB | {resident} MiB |")


if __name__ == "__main__":
    main()
