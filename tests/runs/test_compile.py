"""trainer.compile: the model is compiled, and trains to the numbers of the model that is not."""

from pathlib import Path
from typing import Any

import pytest

from support.configs import composed
from support.worlds import distance, in_world, train, weights


def compiled_frames(cfg: Any) -> int:
    """A training in this rank -> how many graphs Dynamo has compiled in it."""
    train(cfg)
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@pytest.mark.timeout(600)
def test_a_compiled_model_trains_to_the_same_numbers(tmp_path: Path) -> None:
    short = ["model=mlp", "trainer.precision=fp64", "trainer.max_steps=3", "evaluation.batch_size=64", "logger=[]"]
    eager = in_world(1, compiled_frames, composed(f"run_dir={tmp_path / 'eager'}", *short))
    compiling = composed(f"run_dir={tmp_path / 'compiled'}", *short, "trainer.compile=true")
    compiled = in_world(1, compiled_frames, compiling, limit=500)  # minutes on a busy machine without a cache
    assert eager == [0]
    assert compiled[0] > 0
    assert distance(weights(tmp_path / "eager"), weights(tmp_path / "compiled")) < 1e-12
