"""What Lockstep's own promises cost: identical bits (strategy=shards), snapshots while training goes on, a look at where time goes.

python bench/overheads.py [--rounds=3]

Whole runs of src/train.py's own work(), one after the other in turns, so that whatever else the machine does falls on all
alike; of each the fastest epoch counts. What trainer.profile=on costs is the difference of a run's own steps, every other of
them measured. Prints three tables in markdown.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

CONVNET = ["dataset.augment.pad=1", "trainer.batch_size=128", "trainer.epochs=4"]
PROFILE = ["trainer.profile=on", "timeline.every=2", "timeline.trace_after=50", "trainer.epochs=40", "trainer.eval_every=40",
           "trainer.save_every=40epochs"]  # fmt: skip
LARGE = ["model=mlp", "model.width=2048", "model.depth=3", "optimizer=adamw", "trainer.epochs=4", "trainer.save_every=10steps"]


def measured(cfg):
    """One rank's life: the samples per second of its fastest epoch, the seconds in each save on its thread and on the writer's."""
    import train
    from lockstep import board, snapshot

    speeds, copying, writing = [], [], []

    def timed(function, seconds):
        def timed(*arguments):
            began = time.perf_counter()
            function(*arguments)
            seconds.append(time.perf_counter() - began)

        return timed

    show = board.Board.end_training
    board.Board.end_training = lambda panel, *arguments: (show(panel, *arguments), speeds.append(panel.speed))
    snapshot.Keeper.save = timed(snapshot.Keeper.save, copying)
    snapshot.Keeper._write = timed(snapshot.Keeper._write, writing)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    train.work(cfg)
    return max(speeds, default=0), copying, writing


def profiled(cfg):
    """One rank's life with trainer.profile=on, which looks away in every other epoch.

    Seconds of CPU, which a busy machine does not stretch: of a plain step, and how many more of a measured one.
    """
    import train
    from lockstep import timeline

    spent, measured, due, end_step = [], 0, timeline.Timeline.due, timeline.Timeline.after_step

    def by_turns(line):
        nonlocal measured
        watcher = due(line) if line.run.progress.epoch % 2 == 0 else None
        measured += isinstance(watcher, timeline.Split)
        return watcher

    def after_step(line, samples):
        if line.run.progress.samples == samples:
            line.began = time.process_time()  # an epoch's first step is over
        end_step(line, samples)
        if line.run.progress.samples >= line.samples:
            spent.append(time.process_time() - line.began)

    timeline.Timeline.due, timeline.Timeline.after_step = by_turns, after_step
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    train.work(cfg)
    spent = spent[4:]  # warmed up, and the trace is taken
    watched, plain = spent[::2], spent[1::2]
    steps = -(-1437 // cfg.trainer.batch_size) - 1
    more = statistics.median(one - other for one, other in zip(watched, plain, strict=True)) / (measured / (2 + len(watched)))
    return statistics.median(plain) / steps, more


def run(size, *overrides, life=measured):
    """What rank 0 of a fresh world of `size` measures."""
    from conftest import in_world
    from test_configs import composed

    with tempfile.TemporaryDirectory() as folder:
        return in_world(size, life, composed(f"run_dir={folder}", *overrides))[0]


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    rounds = options.parse_args().rounds
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    strategies = {"ddp": [], "ddp, sync_bn=on": ["sync_bn=on"], "shards, 4 of them": ["strategy=shards", "trainer.shards=4"]}
    speeds = {(name, size): [] for name in strategies for size in (1, 2)}
    for _ in range(rounds):
        for (name, size), found in speeds.items():
            found.append(run(size, *CONVNET, *strategies[name])[0])
    print("| strategy | 1 rank | 2 ranks |\n|---|---|---|")
    for name in strategies:
        ratios = [[one / other for one, other in zip(speeds[name, size], speeds["ddp", size], strict=True)] for size in (1, 2)]
        print(f"| {name} |" + "".join(f" {statistics.median(some):.2f} ({min(some):.2f}-{max(some):.2f}) |" for some in ratios))

    answers = [run(1, *LARGE) for _ in range(rounds)]
    copying, writing = (statistics.median(seconds for answer in answers for seconds in answer[column]) for column in (1, 2))
    print("\n| a snapshot of 8.6 million weights and their moments, 103 MB | |\n|---|---|")
    print(f"| on the training thread | {1000 * copying:.0f} ms |\n| on the writer's thread | {1000 * writing:.0f} ms |")

    from test_configs import composed

    every = composed().timeline.every
    head = ["trainer.profile=on, CPU time", "a step", "more in a measured one", f"of all, one in {every} measured"]
    print(f"\n| {' | '.join(head)} |\n" + "|---" * len(head) + "|")
    for name in ("convnet", "mlp"):
        answers = [run(2, *PROFILE, f"model={name}", life=profiled) for _ in range(rounds)]
        step, more = (1000 * statistics.median(column) for column in zip(*answers, strict=True))
        print(f"| {name}, 2 ranks | {step:.2f} ms | {more:.2f} ms | {more / step / every:.2%} |", flush=True)


if __name__ == "__main__":
    main()
