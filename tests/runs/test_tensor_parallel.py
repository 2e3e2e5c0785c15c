"""strategy=tensor_parallel: what a rank holds, and one process's numbers with data parallel beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.loggers.csv_logger import read_rows
from lockstep.models.gpt import gpt
from lockstep.snapshots.files import list_snapshots
from lockstep.strategies.tensor_parallel import TensorParallel
from support.configs import composed
from support.small_text import small_gpt
from support.worlds import distance, in_world, train_all, weights

PLAN = [{"*.queries_keys_values": "colwise"}, {"*.widen": "colwise"}, {"*.projection": "rowwise"}]


def grad_norms(folder: Path) -> list[float]:
    return [value for _, tag, value in read_rows(folder / "metrics.csv") if tag == "train/grad_norm"]


def test_two_replicas_of_two_ranks_have_one_processs_numbers(tmp_path: Path) -> None:
    options = ["trainer.ema=0.8", "trainer.gradient_accumulation_steps=2", "trainer.max_steps=6", "logging.every=1"]
    base = small_gpt(tmp_path, *options, "logger=[csv]", "trainer.max_grad_norm=0.1", "optimizer.fused=false")
    two_by_two = ["strategy=tensor_parallel", "strategy.replicas=2"]
    in_world(1, train_all, [composed(*base, f"run_dir={tmp_path / 'alone'}")])
    in_world(4, train_all, [composed(*base, *two_by_two, f"run_dir={tmp_path / 'spread'}")])
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "spread")) < 1e-11
    assert len(grad_norms(tmp_path / "alone")) == 6
    assert grad_norms(tmp_path / "spread") == pytest.approx(grad_norms(tmp_path / "alone"), rel=1e-9)
    alone, spread = (
        torch.load(list_snapshots(tmp_path / name / "snapshots")[0], weights_only=True) for name in ("alone", "spread")
    )
    assert spread["meter"]["totals"].tolist() == pytest.approx(alone["meter"]["totals"].tolist(), rel=1e-12)


def values_after_setup(rank_plan: Any) -> dict[str, int]:
    """{layer: how many of its weights this rank holds}"""
    from lockstep.distributed.world import init_distributed
    from lockstep.strategies.gradient_sync import GradientSync

    with init_distributed("gloo", 60) as world:
        strategy = TensorParallel(1, rank_plan)
        strategy.setup(gpt([8], 28, layers=1, heads=2, width=16, dropout=0.0, tied=True), world, GradientSync())
        held: dict[str, Any] = dict(strategy.model.named_parameters())
        return {
            name: (value.to_local() if hasattr(value, "to_local") else value).numel() for name, value in held.items()
        }


def test_a_rank_holds_half_of_each_matrix_that_the_plan_names() -> None:
    for held in in_world(2, values_after_setup, PLAN):
        assert held["block1.attention.queries_keys_values.weight"] == 3 * 16 * 16 // 2
        assert held["block1.attention.projection.weight"] == 16 * 16 // 2
        assert held["block1.mlp.widen.weight"] == held["block1.mlp.projection.weight"] == 4 * 16 * 16 // 2
        assert held["embedding.tokens.weight"] == 28 * 16


def test_a_gpt_that_cannot_be_cut_is_refused() -> None:
    with torch.device("meta"):
        model = gpt([8], 28, layers=1, heads=2, width=24, dropout=0.0, tied=True)
    with pytest.raises(ConfigError, match="share the 2 heads of block1.attention among 3 ranks; type model.heads=3"):
        TensorParallel(1, PLAN).validate_model(model, 3)
    with pytest.raises(ConfigError, match="embedding.tokens.weight, which is also head.linear.weight; .*tied=false"):
        TensorParallel(1, [{"embedding.tokens": "rowwise"}]).validate_model(model, 2)
    with pytest.raises(ConfigError, match=r"the nearest names are .*block1.mlp.widen.*; type model=gpt"):
        TensorParallel(1, [{"block1.mlp.wide": "colwise"}]).validate_model(model, 2)
    with pytest.raises(ConfigError, match="the model has no .*, as it is one layer; type model=gpt"):
        TensorParallel(1, PLAN).validate_model(torch.nn.Linear(2, 2), 2)
    TensorParallel(1, PLAN).validate_model(model, 2)
    TensorParallel(2, PLAN).validate_model(model, 4)
