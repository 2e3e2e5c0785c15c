"""What a run leaves at its end."""

from pathlib import Path

import torch

import lockstep
from support.configs import composed, with_values
from support.worlds import in_world, train_all


def test_the_last_weights_are_in_model_pt_and_the_best_ones_in_the_snapshot_of_the_best_evaluation(
    tmp_path: Path,
) -> None:
    """An optimizer that makes the loss larger: the best evaluation is the first one."""
    small = [
        "model=linear",
        "optimizer=adamw",
        "optimizer.fused=false",
        "trainer.ema={_target_:lockstep.training.ema.Average,decay:0.9}",
        "logger=[]",
    ]
    base = composed(
        *small, "strategy=fsdp", "+optimizer.maximize=true", "monitor=val/loss", "trainer.epochs=2", whole=False
    )
    worse, best = (with_values(base, f"run_dir={tmp_path / name}") for name in ("worse", "best"))
    in_world(2, train_all, [worse, with_values(best, "trainer.pause_after=1")])
    last, expected = (torch.load(tmp_path / path / "model.pt", weights_only=True) for path in ("worse", "best"))
    loaded = lockstep.load(tmp_path / "worse", which="best").net.state_dict()
    assert last.keys() == loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert not any(torch.equal(loaded[name], last[name]) for name in last)
