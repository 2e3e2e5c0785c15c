"""What a run leaves at its end: its last weights, and its best ones if these are others."""

from pathlib import Path

import torch

import lockstep
from support.configs import composed, with_values
from support.worlds import in_world, train_all


def test_the_best_weights_have_a_file_of_their_own_if_they_are_not_the_last(tmp_path: Path) -> None:
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
    files = {name: sorted(path.name for path in (tmp_path / name).glob("*.pt")) for name in ("worse", "best")}
    assert files == {"worse": ["model.pt", "model_best.pt"], "best": ["model.pt"]}
    last, first, expected = (
        torch.load(tmp_path / path, weights_only=True)
        for path in ("worse/model.pt", "worse/model_best.pt", "best/model.pt")
    )
    assert last.keys() == first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name]) for name in expected)
    assert not any(torch.equal(first[name], last[name]) for name in last)
    loaded = lockstep.load(tmp_path / "worse", which="best").net.state_dict()
    assert all(torch.equal(first[name], loaded[name]) for name in loaded)
    # A rank that died while it wrote the best snapshot has left that of another step.
    (best,) = (tmp_path / "worse" / "snapshots").glob("best_*")
    best.rename(best.with_name("best_00000099"))
    (tmp_path / "worse" / "model.pt").unlink()
    in_world(2, train_all, [worse])
    assert sorted(path.name for path in (tmp_path / "worse").glob("*.pt")) == ["model.pt"]
