"""strategy=virtual_ranks: identical bits from other launchers and after stops at other world sizes."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands import TRAIN
from support.configs import composed
from support.run_folders import newest_snapshot
from support.worlds import in_world, train

pytestmark = pytest.mark.drill
TWELVE = ["strategy=virtual_ranks", "strategy.count=12", "optimizer=adamw", "scheduler=constant", "trainer.epochs=2",
          "trainer.batch_size=61"]  # fmt: skip


def snapshot_digest(folder: Path) -> str:
    """SHA-256 of weights, buffers and optimizer state of a run's last snapshot."""
    saved = newest_snapshot(folder)
    states = [value for state in saved["optimizer"].values() for value in state.values()]
    tensors = [*saved["model"].values(), *states]
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in tensors)).hexdigest()


def test_launchers_and_stops_do_not_change_a_bit(tmp_path: Path, start: Any) -> None:
    for number, (launcher, size) in enumerate([("spawn", 4), ("torchrun", 2), ("spawn", 1), ("spawn", 3)], start=1):
        ranks = [f"launch={launcher}", f"launch.nproc_per_node={size}"]
        last = [f"trainer.max_steps={11 * number}"] * (number < 4)  # each stop in mid-epoch
        start(sys.executable, TRAIN, *TWELVE, *ranks, f"hydra.run.dir={tmp_path}/parts", *last).finish()
    in_world(1, train, composed(f"run_dir={tmp_path / 'alone'}", *TWELVE, whole=False))
    assert snapshot_digest(tmp_path / "parts") == snapshot_digest(tmp_path / "alone")
