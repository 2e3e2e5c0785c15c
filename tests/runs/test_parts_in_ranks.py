"""The parts of a job, built once before ranks start, arrive in each of them by every way to start ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, Command
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

# Options that differ from conf/: a rank that built the parts anew from their defaults would compute something else.
JOBS: dict[str, list[str]] = {
    "virtual_ranks": ["strategy=virtual_ranks", "strategy.count=6"],
    "fsdp": ["strategy=fsdp", "strategy.reshard_after_forward=false", "strategy.wrap_min_parameters=1"],
    "powersgd": ["gradient_sync=powersgd", "gradient_sync.rank=3", "gradient_sync.start_step=2"],
}
SHORT = ["model=mlp", "model.width=16", "trainer.max_steps=8", "trainer.precision=fp64", "logger=[]"]


@pytest.fixture(scope="module")
def in_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of each job, and of one with the defaults, trained in ranks that built the parts themselves."""
    folder = tmp_path_factory.mktemp("in_world")
    jobs = JOBS | {"defaults": []}
    in_world(2, train_all, [composed(*SHORT, *words, f"run_dir={folder / name}") for name, words in jobs.items()])
    return folder


@pytest.mark.whole
@pytest.mark.parametrize(("name", "launch"), [*[(name, "spawn") for name in JOBS], ("powersgd", "fork")])
def test_parts_arrive_in_the_ranks(
    start: Callable[..., Command], in_two_ranks: Path, tmp_path: Path, name: str, launch: str
) -> None:
    words = [*SHORT, *JOBS[name], f"launch={launch}", "launch.nproc_per_node=2", "hydra.run.dir=run"]
    start(*PYTHON_TRAIN, *words).finish()
    places = (tmp_path / "run", in_two_ranks / name, in_two_ranks / "defaults")
    found, expected, defaults = map(weights, places)
    assert distance(expected, found) < 1e-12
    assert (distance(defaults, found) > 1e-9) == (name == "powersgd")  # of these, it alone is no exact sum
