"""The parts of a job, built once before ranks start, arrive in each of them by every way to start ranks."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.preflight import preflight
from lockstep.strategies.gradient_sync import GradientSync
from lockstep.strategies.sharded import Sharded
from lockstep.strategies.virtual_ranks import VirtualRanks
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
LAUNCHERS = ["spawn", "torchrun", "fork"]


@pytest.mark.parametrize("launch", [*LAUNCHERS, "env"])
@pytest.mark.parametrize("name", JOBS)
def test_parts_can_be_pickled(tmp_path: Path, name: str, launch: str) -> None:
    ranks = [] if launch == "env" else ["launch.nproc_per_node=2"]
    parts = preflight(composed(*SHORT, *JOBS[name], f"launch={launch}", *ranks, f"run_dir={tmp_path}"))
    copies = pickle.loads(pickle.dumps(parts))
    for part in ("launcher", "mode", "strategy", "gradient_sync"):
        one, other = getattr(parts, part), getattr(copies, part)
        assert type(one) is type(other)
        assert plain(one) == plain(other)
    assert isinstance(copies.strategy, VirtualRanks if name == "virtual_ranks" else Sharded) or name == "powersgd"
    assert isinstance(copies.gradient_sync, GradientSync)


def plain(part: object) -> dict[str, object]:
    """What was given to it."""
    return {key: value for key, value in vars(part).items() if isinstance(value, bool | int | float | str | list)}


@pytest.fixture(scope="module")
def in_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of each job, and of one with the defaults, trained in ranks that built the parts themselves."""
    folder = tmp_path_factory.mktemp("in_world")
    jobs = JOBS | {"defaults": []}
    in_world(2, train_all, [composed(*SHORT, *words, f"run_dir={folder / name}") for name, words in jobs.items()])
    return folder


@pytest.mark.whole
@pytest.mark.parametrize("launch", LAUNCHERS)
@pytest.mark.parametrize("name", JOBS)
def test_parts_arrive_in_the_ranks(
    start: Callable[..., Command], in_two_ranks: Path, tmp_path: Path, name: str, launch: str
) -> None:
    words = [*SHORT, *JOBS[name], f"launch={launch}", "launch.nproc_per_node=2", "hydra.run.dir=run"]
    start(*PYTHON_TRAIN, *words).finish()
    found, expected, defaults = (
        weights(place) for place in (tmp_path / "run", in_two_ranks / name, in_two_ranks / "defaults")
    )
    assert distance(expected, found) < 1e-12
    assert (distance(defaults, found) > 1e-9) == (name == "powersgd")  # of these, it alone is no exact sum
