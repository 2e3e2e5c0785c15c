"""A run does not start if its ranks have different data."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from support.configs import composed
from support.worlds import in_world, train

pytestmark = pytest.mark.whole

SMALL = ["model=mlp", "model.width=16", "logger=[]"]


def _sentences(configs: list[Any]) -> list[str]:
    sentences = []
    for cfg in configs:
        with pytest.raises(ConfigError) as refused:
            train(cfg)
        sentences.append(str(refused.value))
    return sentences


def test_other_data_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    target = "support.damage.digits_of_rank"
    configs = []
    for half, fault in (("train", "short"), ("train", "other"), ("test", "short"), ("test", "other")):
        halves = ["dataset=pair", *(f"dataset.{each}._target_={target}" for each in ("train", "test"))]
        halves += ["+dataset.train.train=true", "+dataset.test.train=false"]
        options = [f"+dataset.{each}.{key}" for each in ("train", "test") for key in (f"half={half}", f"fault={fault}")]
        configs.append(composed(f"run_dir={tmp_path / half / fault}", *SMALL, *halves, *options))
    for short, other, test_short, test_other in in_world(2, _sentences, configs):
        assert short.startswith("the training data has 1436 samples on rank 1 and 1437 on rank 0; copy the same data")
        assert other.startswith("the training data of rank 1 is not that of rank 0: as many samples, but other ones")
        assert test_short.startswith("the test data has 359 samples on rank 1 and 360 on rank 0; copy the same data")
        assert test_other.startswith("the test data of rank 1 is not that of rank 0")
    assert not list(tmp_path.glob("*/*/snapshots/*"))
