"""loader.sampling in whole trainings: the same draw at any number of ranks, after a resume and by virtual ranks."""

from pathlib import Path
from typing import Any

from support.configs import composed
from support.digits import FEW
from support.worlds import distance, in_world, same_bits, train_all, weights

UNEVEN = ["dataset=pair", *(f"dataset.{half}={{_target_:support.own_data.Uneven}}" for half in ("train", "test"))]
BASE = [
    "model=mlp",
    "model.width=8",
    "scheduler=constant",
    "trainer.epochs=2",
    "trainer.batch_size=16",
    "trainer.precision=fp64",
    "logger=[]",
]
RUNS = {
    "in memory": ["loader.sampling=balanced", FEW, "trainer.batch_size=61"],
    "by class": [*UNEVEN, "loader.sampling=balanced", "loader.num_workers=1"],
    "by weight": [*UNEVEN, "loader.sampling=weights", "trainer.gradient_accumulation_steps=3"],
}
VIRTUAL = [*UNEVEN, "loader.sampling=weights", "strategy=virtual_ranks", "strategy.count=6", "trainer.precision=fp32"]


def config(folder: Path, name: str, size: int, *more: str) -> Any:
    return composed(f"run_dir={folder / name / str(size)}", *BASE, *RUNS.get(name, VIRTUAL), *more)


def test_a_training_draws_the_same_samples_on_any_ranks_and_after_a_resume(tmp_path: Path) -> None:
    """A run of each kind on 1 and 3 ranks; another one stops in its second epoch on 2 ranks, and goes on with 3."""
    names = [*RUNS, "virtual"]
    plain = [config(tmp_path, name, 0, "loader.sampling=null") for name in RUNS]
    in_world(1, train_all, [*(config(tmp_path, name, 1) for name in names), *plain])
    in_world(2, train_all, [config(tmp_path, name, 2, "trainer.max_steps=9") for name in names])
    in_world(3, train_all, [config(tmp_path, name, size) for name in names for size in (2, 3)])
    for name in RUNS:
        alone = weights(tmp_path / name / "1")
        assert max(distance(alone, weights(tmp_path / name / str(size))) for size in (2, 3)) < 1e-9, name
        assert distance(alone, weights(tmp_path / name / "0")) > 1e-3, name
    assert all(same_bits(tmp_path / "virtual/1", tmp_path / "virtual" / str(size)) for size in (2, 3))
