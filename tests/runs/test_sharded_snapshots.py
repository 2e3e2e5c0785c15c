"""snapshot.format: which runs save parts, what a rank's part holds, and what reads such a snapshot."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.config.nodes import instantiate
from lockstep.snapshots.files import list_snapshots, parts_of
from lockstep.snapshots.initial_weights import load_initial_weights
from support.commands import ema
from support.configs import composed
from support.digits import FEW_ON_TEST
from support.worlds import in_world, same_bits, train

pytestmark = pytest.mark.whole

# 360 training samples in batches of 64: 6 steps an epoch.
SMALL = ["model=mlp", "logger=[]", "evaluation.batch_size=360", ema(0.9)]
SMALL += ["trainer.precision=fp64", "optimizer=adamw", "trainer.epochs=3", "snapshot.keep_last=1", FEW_ON_TEST]


def train_with_limit(cfg: Any, limit: int) -> float:
    """A training in which snapshot.format=auto saves parts from `limit` bytes on."""
    from lockstep.snapshots import manager

    manager.SHARDED_ABOVE = limit
    return train(cfg)


def test_a_large_state_is_saved_in_parts_and_read_by_all(tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    in_world(2, train_with_limit, composed(f"run_dir={run}", *SMALL, "strategy=fsdp"), 10_000)
    model = torch.load(run / "model.pt", weights_only=True)
    numbers = 4 * sum(value.numel() for value in model.values())  # weights, two moments and the average
    paths = [*list_snapshots(run / "snapshots"), run / "snapshots" / "best.pt"]
    assert {path.name for path in (run / "snapshots").glob("*.parts.*")} == {
        parts.name for path in paths for parts in parts_of(path)
    }
    for path in paths:
        sizes = [file.stat().st_size for file in parts_of(path)[0].iterdir()]
        assert len(sizes) == 2
        assert max(sizes) < 0.6 * sum(sizes)
        assert 8 * numbers <= sum(sizes) < 8.1 * numbers
        assert path.stat().st_size < 0.2 * sum(sizes)
    net = lockstep.load(run)
    assert all(torch.equal(value, model[name]) for name, value in net.net.state_dict().items())
    cfg = composed(f"run_dir={again}", *SMALL, f"resume={run}", "snapshot.format=full")
    with torch.device("meta"):
        load_initial_weights(instantiate(cfg.model), str(paths[0]), [])  # as before a start
    begun = instantiate(cfg.model).double()
    load_initial_weights(begun, str(paths[0]), [])
    assert all(torch.equal(value, model[name]) for name, value in begun.state_dict().items())
    in_world(1, train, cfg)  # nothing is left to train
    assert same_bits(run, again)


def test_the_parts_of_a_snapshot_that_could_not_be_written_are_removed(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "step_00000012.pt.tmp").mkdir(parents=True)  # where a file should be written
    cfg = composed(f"run_dir={tmp_path}", *SMALL, "strategy=fsdp", "snapshot.format=sharded", "snapshot.keep_last=9")
    in_world(2, train, cfg)
    snapshots = tmp_path / "snapshots"
    assert [path.stem for path in list_snapshots(snapshots)] == ["step_00000018", "step_00000006"]
    assert not list(snapshots.glob("step_00000012.parts.*"))
    assert len(list(snapshots.glob("step_*.parts.*"))) == 2
    assert "no snapshot at step 12: " in (tmp_path / "train.log").read_text()


def test_a_small_state_is_saved_in_one_file(tmp_path: Path) -> None:
    cfg = composed(f"run_dir={tmp_path}", *SMALL, "strategy=fsdp", "trainer.epochs=1")
    in_world(2, train_with_limit, cfg, 10_000_000)
    assert not list(tmp_path.glob("snapshots/*.parts.*"))
    saved = torch.load(list_snapshots(tmp_path / "snapshots")[0], weights_only=True)
    assert all(torch.is_tensor(value) for value in saved["model"].values())
