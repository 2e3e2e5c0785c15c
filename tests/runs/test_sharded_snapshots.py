"""Snapshots of ranks that hold parts: what a rank writes, and what reads such a snapshot."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.config.check import instantiate
from lockstep.errors import ConfigError
from lockstep.snapshots import files
from lockstep.snapshots.files import list_snapshots
from lockstep.snapshots.initial_weights import load_initial_weights
from support.commands import ema
from support.configs import composed
from support.digits import FEW_ON_TEST
from support.worlds import in_world, same_bits, train

pytestmark = pytest.mark.whole

# 360 training samples in batches of 64: 6 steps an epoch.
SMALL = ["model=mlp", "logger=[]", "evaluation.batch_size=360", "strategy=fsdp", ema(0.9)]
SMALL += ["trainer.precision=fp64", "optimizer=adamw", "trainer.epochs=3", FEW_ON_TEST]


def test_each_rank_writes_its_part_and_all_read_it(tmp_path: Path) -> None:
    run, again, snapshots = tmp_path / "run", tmp_path / "again", tmp_path / "run" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "step_00000012.tmp").touch()  # where a folder should be: this one cannot be written
    in_world(2, train, composed(f"run_dir={run}", *SMALL, "snapshot.keep_last=9"))
    assert "no snapshot step_00000012: " in (run / "train.log").read_text()
    assert [path.name for path in list_snapshots(snapshots)] == ["step_00000018", "step_00000006"]
    model = torch.load(run / "model.pt", weights_only=True)
    numbers = 4 * sum(value.numel() for value in model.values())  # weights, two moments and the average
    paths = [*list_snapshots(snapshots), *list_snapshots(snapshots, "best")]
    for path in paths:
        sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
        assert len(sizes) == 2
        assert max(sizes) < 0.6 * sum(sizes)
        assert 8 * numbers <= sum(sizes) < 8.2 * numbers
        assert (path / "state.pt").stat().st_size < 0.2 * sum(sizes)
    net = lockstep.load(run)
    assert all(torch.equal(value, model[name]) for name, value in net.net.state_dict().items())
    cfg = composed(f"run_dir={again}", *SMALL, f"resume={run}", "strategy=ddp")
    begun = instantiate(cfg.model).double()
    load_initial_weights(begun, str(paths[0]), [])
    assert all(torch.equal(value, model[name]) for name, value in begun.state_dict().items())
    in_world(1, train, cfg)  # nothing is left to train
    assert same_bits(run, again)
    (snapshots / "step_00000001").touch()  # an older one that cannot be removed
    in_world(2, train, composed(f"run_dir={run}", *SMALL, "trainer.epochs=4", "snapshot.keep_last=1"))
    assert [path.name for path in list_snapshots(snapshots)][0] == "step_00000024"


def without_safetensors(cfg: Any) -> str:
    files.find_spec = lambda name: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as refused:
        train(cfg)
    return str(refused.value)


def test_without_safetensors_it_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for said in in_world(2, without_safetensors, composed(f"run_dir={tmp_path}", *SMALL)):
        assert said.endswith("holds a part of the weights needs safetensors; type pip install safetensors")
