"""One training on other numbers of ranks, from other launchers and with stops, measured against one rank.

`make promise` prints a table. Each line shows the largest relative difference of any logged loss (in float64, as the
snapshots keep them) and of any weight, relative to the largest weight of its tensor.
"""

import sys
import tempfile
from pathlib import Path

import torch

from lockstep.runs.record import read_run
from lockstep.snapshots.files import list_snapshots
from support.commands import LAUNCHERS, TRAIN, Command
from support.configs import composed
from support.run_folders import contents
from support.worlds import in_world, train

LIMITS = {"fp64": 1e-9, "fp32": 1e-4}
# 1437 digits in batches of 61: the last one of an epoch holds 34, which no number of ranks below divides well.
TRAINING = [
    "sync_bn=on", "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1}", "trainer.batch_size=61",
    "optimizer.lr=0.01", "snapshot.every=1steps", "snapshot.keep_last=1000",
    "loader.validation=null", "evaluation.test=every",
]  # fmt: skip
STARTERS = {"torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", TRAIN]}
STARTERS |= {name: LAUNCHERS[name] for name in ("torchrun", "launch=torchrun", "launch=spawn", "mpirun")}
STEPS = 24  # of an epoch


def in_ranks(size, folder, *overrides):
    in_world(size, train, composed(f"run_dir={folder}", *TRAINING, *overrides))
    return folder


def by_command(command, folder, *overrides):
    folder.mkdir()
    Command([*command, *TRAINING, f"hydra.run.dir={folder}", *overrides], folder, new_process=True).finish()
    return folder


def weights_apart(one, other):
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    first, second = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    floating = [name for name in first if first[name].is_floating_point()]
    return max(((first[name] - second[name]).abs().max() / first[name].abs().max()).item() for name in floating)


def _losses(folder):
    """The mean training loss so far in its epoch after every step but the last, and then the test loss."""
    states = [contents(path) for path in reversed(list_snapshots(folder / "snapshots"))]
    means = [state["meter"]["totals"][0] / state["meter"]["totals"][-1] for state in states]
    return torch.tensor([*means[:-1], read_run(folder)["test"]["metrics"]["loss"]], dtype=torch.float64)


def table(folder, sizes=(2, 3, 4, 8), accumulations=(1, 2, 4), starters=STARTERS, epochs=3):
    """Yields (what, precision, loss difference, weight difference), as they are measured."""

    def differences(one, other):
        """(of the losses, of the weights) between two run folders: the largest relative differences."""
        mine, theirs = _losses(one), _losses(other)
        assert len(mine) == len(theirs) == STEPS * epochs
        return ((mine - theirs).abs() / mine.abs()).max().item(), weights_apart(one, other)

    length = f"trainer.epochs={epochs}"
    for precision in LIMITS:
        for steps in accumulations:
            options = [length, f"trainer.precision={precision}", f"trainer.gradient_accumulation_steps={steps}"]
            alone = in_ranks(1, folder / f"{precision}-{steps}-1", *options)
            for size in sizes:
                other = in_ranks(size, folder / f"{precision}-{steps}-{size}", *options)
                yield f"{size} ranks, gradient accumulation {steps}", precision, *differences(alone, other)
    options = [length, "trainer.precision=fp64"]
    for name, command in starters.items():
        other = by_command(command, folder / name.replace("=", "-"), *options)
        yield f"2 ranks by {name}", "fp64", *differences(folder / "fp64-1-1", other)
    options.append("scheduler=constant")
    for size, share in ((4, 0.18), (2, 0.43), (1, 0.82), (3, 1)):  # each stop in the middle of an epoch
        last = f"trainer.max_steps={int(share * STEPS * epochs)}" if share < 1 else "trainer.max_steps=null"
        in_ranks(size, folder / "stops", *options, last)
    alone = in_ranks(1, folder / "no-stops", *options)
    yield "stopped in mid-epoch on 4, 2, 1 and 3 ranks", "fp64", *differences(alone, folder / "stops")


def main():
    with tempfile.TemporaryDirectory() as folder:
        print("| against one rank | precision | losses differ by | weights differ by | at most |")
        print("|---|---|---|---|---|")
        for what, precision, losses, weights in table(Path(folder)):
            print(f"| {what} | {precision} | {losses:.1e} | {weights:.1e} | {LIMITS[precision]:.0e} |", flush=True)


if __name__ == "__main__":
    main()
