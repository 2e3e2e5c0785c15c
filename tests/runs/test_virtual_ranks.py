"""strategy=virtual_ranks: the same bits at every world size."""

from pathlib import Path

import pytest
import torch

from lockstep.strategies.virtual_ranks import tree_sum
from support.configs import composed, with_values
from support.worlds import distance, in_world, same_bits, train_all, weights

SHORT = [
    "strategy=virtual_ranks",
    "optimizer=adamw",
    "trainer.epochs=1",
    "trainer.max_steps=5",
    "trainer.batch_size=61",
    "logger=[]",
]
MODELS = {"batch norm": ["model=convnet"], "dropout": ["model=mlp", "model.dropout=0.3"]}


def test_one_two_and_four_ranks_end_in_identical_bits(tmp_path: Path) -> None:
    bases = {name: composed(*SHORT, *model) for name, model in MODELS.items()}
    for size in (1, 2, 4):
        in_world(
            size, train_all, [with_values(cfg, f"run_dir={tmp_path / name / str(size)}") for name, cfg in bases.items()]
        )
    for name in MODELS:
        assert same_bits(tmp_path / name / "1", tmp_path / name / "2"), name
        assert same_bits(tmp_path / name / "1", tmp_path / name / "4"), name


def test_without_batch_norm_and_dropout_virtual_ranks_are_plain_training(tmp_path: Path) -> None:
    plain = ["model=mlp", "trainer.precision=fp64", "trainer.max_steps=5", "trainer.batch_size=61", "logger=[]"]
    runs = {"plain": [], "three": ["strategy=virtual_ranks", "strategy.count=3"]}
    in_world(1, train_all, [composed(f"run_dir={tmp_path / name}", *plain, *more) for name, more in runs.items()])
    assert 0 < distance(weights(tmp_path / "plain"), weights(tmp_path / "three")) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_a_tree_sum_does_not_depend_on_who_computed_the_rows(count: int) -> None:
    rows = torch.randn(count, 100, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(tree_sum(rows), rows.sum(0))
    assert torch.equal(tree_sum(rows), tree_sum(rows.clone()))
    if count == 3:
        assert torch.equal(tree_sum(rows), (rows[0] + rows[1]) + rows[2])
