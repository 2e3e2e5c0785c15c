"""One training on other numbers of ranks, from other launchers and with stops, measured against one rank."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lockstep.runs.record import read_run
from lockstep.snapshots.files import list_snapshots
from support.commands import TORCHRUN, TRAIN, Command
from support.configs import composed
from support.run_folders import contents
from support.worlds import in_world, train

LIMITS = {"fp64": 1e-9, "fp32": 1e-4}
# 1437 digits in batches of 61: the last one of an epoch holds 34, which no number of ranks below divides well.
TRAINING = [
    "sync_bn=on", "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1}", "trainer.batch_size=61",
    "trainer.epochs=3", "optimizer.lr=0.01", "snapshot.every=1steps", "snapshot.keep_last=1000",
    "loader.validation=null", "evaluation.test=every",
]  # fmt: skip
STARTERS = {
    "torchrun": [*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN],
    "torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", TRAIN],
    "launch=torchrun": [sys.executable, TRAIN, "launch=torchrun"],
    "launch=spawn": [sys.executable, TRAIN, "launch=spawn"],
    "mpirun": ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, TRAIN],
}
STEPS = 72


def in_ranks(size: int, folder: Path, *overrides: str) -> Path:
    """The training in a world of `size` forked ranks. Returns its run folder."""
    in_world(size, train, composed(f"run_dir={folder}", *TRAINING, *overrides))
    return folder


def by_command(command: list[str], folder: Path, *overrides: str) -> Path:
    """The training as a user starts it. Returns its run folder."""
    folder.mkdir()
    words = [*command, *TRAINING, f"hydra.run.dir={folder}", *overrides]
    Command(words, folder, new_process=True).finish()
    return folder


def differences(one: Path, other: Path) -> tuple[float, float]:
    """(of the losses, of the weights) between two run folders: the largest relative differences."""
    mine, theirs = _losses(one), _losses(other)
    assert len(mine) == len(theirs) == STEPS
    losses = ((mine - theirs).abs() / mine.abs()).max().item()
    first, second = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    floating = [name for name in first if first[name].is_floating_point()]
    weights = max(((first[name] - second[name]).abs().max() / first[name].abs().max()).item() for name in floating)
    return losses, weights


def _losses(folder: Path) -> Tensor:
    """The mean training loss so far in its epoch after every step but the last, and then the test loss."""
    states = [contents(path) for path in reversed(list_snapshots(folder / "snapshots"))]
    means = [state["meter"]["totals"][0] / state["meter"]["totals"][-1] for state in states]
    return torch.tensor([*means[:-1], read_run(folder)["test"]["metrics"]["loss"]], dtype=torch.float64)


def table(
    folder: Path,
    sizes: Sequence[int] = (2, 3, 4, 8),
    accumulations: Sequence[int] = (1, 2, 4),
    starters: Mapping[str, list[str]] = STARTERS,
) -> Iterator[tuple[str, str, float, float]]:
    """Yields (what, precision, loss difference, weight difference), as they are measured."""
    for precision in LIMITS:
        for steps in accumulations:
            options = [f"trainer.precision={precision}", f"trainer.gradient_accumulation_steps={steps}"]
            alone = in_ranks(1, folder / f"{precision}-{steps}-1", *options)
            for size in sizes:
                other = in_ranks(size, folder / f"{precision}-{steps}-{size}", *options)
                yield f"{size} ranks, gradient accumulation {steps}", precision, *differences(alone, other)
    for name, command in starters.items():
        alone, place = folder / "fp64-1-1", folder / name.replace("=", "-")
        yield f"2 ranks by {name}", "fp64", *differences(alone, by_command(command, place, "trainer.precision=fp64"))
    yield "stopped in mid-epoch on 4, 2, 1 and 3 ranks", "fp64", *_with_stops(folder)


def _with_stops(folder: Path) -> tuple[float, float]:
    options = ["trainer.precision=fp64", "scheduler=constant"]
    for size, last in ((4, "13"), (2, "31"), (1, "59"), (3, "null")):  # each stop in the middle of an epoch
        in_ranks(size, folder / "stops", *options, f"trainer.max_steps={last}")
    return differences(in_ranks(1, folder / "no-stops", *options), folder / "stops")
