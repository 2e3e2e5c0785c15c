"""`make promise`: one training on other numbers of ranks, from other starters and with stops, measured against one rank.

Each line shows the largest relative difference of any logged loss (in float64, as the snapshots keep them) and of any
weight, relative to the largest weight of its tensor. tests/test_promise.py holds every line to its limit.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch

from conftest import TORCHRUN, TRAIN, Command, in_world
from lockstep import snapshot
from test_configs import composed

LIMITS = {"fp64": 1e-9, "fp32": 1e-4}
# 1437 digits in batches of 61: the last one of an epoch holds 34, which no number of ranks below divides well.
TRAINING = ["sync_bn=on", "dataset.augment.pad=1", "trainer.batch_size=61", "trainer.epochs=3", "optimizer.lr=0.01",
            "objective=test/loss", "trainer.save_every=1steps", "trainer.keep=1000"]  # fmt: skip
STARTERS = {
    "torchrun": [*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN],
    "torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", TRAIN],
    "launch=torchrun": [sys.executable, TRAIN, "launch=torchrun"],
    "launch=spawn": [sys.executable, TRAIN, "launch=spawn"],
    "mpirun": ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, TRAIN],
}


def in_ranks(size, folder, *overrides):
    """The training in a world of `size` forked ranks."""
    in_world(size, _work, composed(f"run_dir={folder}", *TRAINING, *overrides))
    return folder


def _work(cfg):
    import train

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the table speaks)
    train.work(cfg)


def by_command(command, folder, *overrides):
    """The training as a user starts it."""
    folder.mkdir()
    Command([*command, *TRAINING, f"hydra.run.dir={folder}", *overrides], folder).finish()
    return folder


def differences(one, other):
    """(of the losses, of the weights) between two run folders."""
    mine, theirs = _losses(one), _losses(other)
    assert len(mine) == len(theirs) == 72
    losses = ((mine - theirs).abs() / mine.abs()).max().item()
    mine, theirs = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    weights = max(((mine[name] - theirs[name]).abs().max() / mine[name].abs().max()).item() for name in mine if mine[name].is_floating_point())
    return losses, weights


def _losses(folder):
    """The mean training loss so far in its epoch after every step, and in the last place the best test loss."""
    states = [torch.load(path, weights_only=True) for path in reversed(snapshot.complete(folder / "snapshots"))]
    means = [state["meter"][0] / state["meter"][-1] for state in states]
    return torch.tensor([*means[:-1], states[-1]["progress"]["best"]], dtype=torch.float64)


def table(folder, sizes=(2, 3, 4, 8), accumulations=(1, 2, 4), starters=STARTERS):
    """Yields (what, precision, loss difference, weight difference), as they are measured."""
    for precision in LIMITS:
        for accumulate in accumulations:
            how = [f"trainer.precision={precision}", f"trainer.accumulate={accumulate}"]
            alone = in_ranks(1, folder / f"{precision}-{accumulate}-1", *how)
            for size in sizes:
                other = in_ranks(size, folder / f"{precision}-{accumulate}-{size}", *how)
                yield f"{size} ranks, accumulate {accumulate}", precision, *differences(alone, other)
    for name, command in starters.items():
        alone, other = folder / "fp64-1-1", by_command(command, folder / name.replace("=", "-"), "trainer.precision=fp64")
        yield f"2 ranks by {name}", "fp64", *differences(alone, other)
    for size, last in ((4, 13), (2, 31), (1, 59), (3, None)):  # each stop in the middle of an epoch
        in_ranks(size, folder / "stops", "trainer.precision=fp64", "scheduler=constant", f"trainer.max_steps={last or 'null'}")
    alone = in_ranks(1, folder / "no-stops", "trainer.precision=fp64", "scheduler=constant")
    yield "stopped in mid-epoch on 4, 2, 1 and 3 ranks", "fp64", *differences(alone, folder / "stops")


def main():
    print("| against one rank | precision | losses differ by | weights differ by | at most |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for what, precision, losses, weights in table(Path(folder)):
            print(f"| {what} | {precision} | {losses:.1e} | {weights:.1e} | {LIMITS[precision]:.0e} |", flush=True)


if __name__ == "__main__":
    main()
