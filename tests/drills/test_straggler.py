"""A rank that is slower than the others is named, with what it spends the time on."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.training.timing import find_stragglers
from support.configs import composed
from support.event_files import scalars
from support.worlds import in_world, train_all

pytestmark = pytest.mark.drill

SMALL = ["model=mlp", "model.width=16", "logger=[tensorboard]", "trainer.max_steps=44", "trainer.epochs=4"]
SMALL += ["logging.every=5", "watch.straggler=2"]
SLOW = {
    "computing": ["model._target_=support.slow.SlowOnOneRank"],
    "data": ["dataset.train._target_=support.slow.SlowDataOnOneRank", "dataset.train.train=true"],
    "writing": ["logger.tensorboard._target_=support.slow.SlowLogger"]
    + [f"logger.tensorboard.{word}" for word in ("images=0", "histograms=false", "graph=false")],
}


def test_only_medians_count() -> None:
    def times(slow: float) -> list[list[float]]:
        return [[1.0, 10.0, 0.0], [1.0, 10.0, 0.0], [1.0 + slow, 10.5, 0.0]]

    assert find_stragglers([times(30.0)] * 5, 1.5) == [(2, 41.5, 11.0, "data")]
    assert find_stragglers([times(30.0)] * 2 + [times(0.0)] * 3, 1.5) == []
    assert find_stragglers([times(4.0)] * 5, 1.5) == []
    assert find_stragglers([[[0.0, 0.1, 0.0], [0.0, 0.5, 0.0]]] * 5, 1.5) == []  # less than 1 ms is noise


@pytest.mark.parametrize("sync", ["auto", "all_reduce"])
def test_a_slow_rank_is_named_once(tmp_path: Path, sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, *options: str) -> Any:
        return composed(f"run_dir={tmp_path / name}", *SMALL, f"gradient_sync={sync}", *options)

    configs = [run(name, *options) for name, options in SLOW.items()] + [run("off", *SLOW["computing"])]
    configs[-1] = configs[-1].changed({"watch.straggler": None})
    in_world(2, train_all_soon, configs)
    for name in SLOW:
        slow = 0 if name == "writing" else 1
        log = (tmp_path / name / "train.log").read_text()
        assert log.count("is slow: its own part of a step took") == 1
        assert f"rank {slow} on " in log
        assert f"; the difference is in {name}" in log
        curves = scalars(tmp_path / name)
        slowest, fastest = (dict(curves[f"world/{which}_rank_ms"]) for which in ("slowest", "fastest"))
        later = [step for step in slowest if step > 15]
        assert later
        assert sum(slowest[step] - fastest[step] >= 20 for step in later) > len(later) / 2
        of_ranks = [dict(curves[f"world/rank{rank}_ms"]) for rank in range(2)]
        assert all(max(curve[step] for curve in of_ranks) == slowest[step] for step in slowest)
        assert sum(of_ranks[slow][step] == slowest[step] for step in later) > len(later) / 2
    assert "is slow" not in (tmp_path / "off" / "train.log").read_text()
    assert "world/slowest_rank_ms" not in scalars(tmp_path / "off")


def test_a_rank_that_is_slow_for_a_moment_is_not_named(tmp_path: Path) -> None:
    """44 steps take a second, which is less than 5."""
    config = composed(f"run_dir={tmp_path}", *SMALL, *SLOW["computing"])
    in_world(2, train_all_briefly, [config])
    assert max(dict(scalars(tmp_path)["world/slowest_rank_ms"]).values()) > 20
    assert "is slow" not in (tmp_path / "train.log").read_text()


def train_all_soon(configs: list[Any]) -> None:
    """Several trainings in this rank that compare after 25 steps, not after 100 and 5 s."""
    from lockstep.training import timing

    timing.SECONDS = 0.0
    train_all_briefly(configs)


def train_all_briefly(configs: list[Any]) -> None:
    from lockstep.training import timing

    timing.STEPS = 25
    train_all(configs)
