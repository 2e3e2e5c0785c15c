"""What mode=check says of nets, data, tasks and strategies. tests/runs/test_check_commands.py runs whole commands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.nodes import instantiate
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.launchers.local import SpawnLauncher
from lockstep.modes.check import PROMISES, Ended, ended
from lockstep.modes.recorder import compare, kept, run, traces_in
from lockstep.modes.train import Train
from support.configs import composed, parts_of, record_of
from support.own_data import Points
from support.worlds import in_world
from zoo.checked_nets import RIGHT, WRONG, Animal

CHECK = instantiate(composed("mode=check").mode)


def shares(config: RunConfig) -> int:
    strategy: Any = instantiate(config.strategy)
    return strategy.data_parallel_size(2)


def job(animal: Animal) -> RunConfig:
    """The job of an animal. A class among its words is that of the data; without a class of a net they are all."""
    model, more, *_ = animal
    if isinstance(model, str):
        return composed(*more)
    data: Any = next((word for word in more if isinstance(word, type)), Points)
    nodes = [f"dataset.{split}._target_={data.__module__}.{data.__name__}" for split in ("train", "test")]
    words = ["dataset=pair", *nodes, "dataset.classes=2", "dataset.shape=[4]", "trainer.batch_size=14", "model=linear"]
    words += [f"model._target_={model.__module__}.{model.__name__}", "evaluation.test=every"]
    return composed(*words, *(word for word in more if isinstance(word, str)))


def taken(ways: list[RunConfig]) -> list[Any]:
    """In a rank: the facts of each run."""
    torch.set_num_threads(1)
    for way in ways:
        Path(way.run_dir).mkdir(parents=True, exist_ok=True)
    return [run(way, record_of(way), replace(parts_of(way), mode=Train())) for way in ways]


def failures(ways: list[tuple[int, RunConfig]]) -> list[str]:
    """The sentence of the error that ends each run on so many ranks."""
    torch.set_num_threads(1)
    sentences = []
    for ranks, way in ways:
        launcher = SpawnLauncher("fork", ranks, 1, 0, "127.0.0.1", 0)
        sentences.append(ended(way, record_of(way), replace(parts_of(way), launcher=launcher, mode=Train())).failed)
    return sentences


def tables(animals: list[Animal], folder: Path) -> list[dict[str, tuple[str, str]]]:
    """{way: (whether its promise holds, why)} of each animal: of a wrong one its own way alone. The runs of all animals
    share a world for each way, but for those that end with an error."""
    jobs = [job(animal).changed({"trainer.precision": "fp64"}) for animal in animals]
    ways = [CHECK.ways(one, shares(one), folder / str(number)) for number, one in enumerate(jobs)]
    wanted = [
        animal[2:3] or ("again", "two", "cut", "resumed", *way.keys() & {"compiled"})
        for animal, way in zip(animals, ways, strict=True)
    ]
    ends = [(number, animal[2]) for number, animal in enumerate(animals) if animal[4:]]
    runs: list[dict[str, Ended]] = [{} for _ in jobs]
    for names, ranks in (({"one"}, 1), ({"again", "compiled"}, 1), ({"resumed", "cut"}, 1), ({"two"}, 2)):
        chosen = [
            (number, name)
            for number in range(len(jobs))
            for name in sorted(names)
            if name in ("one", *wanted[number]) and (number, name) not in ends
        ]
        facts, *_ = in_world(ranks, taken, [ways[number][name] for number, name in chosen], limit=600)
        for (number, name), found in zip(chosen, facts, strict=True):
            runs[number][name] = Ended(found, traces_in(Path(ways[number][name].run_dir)))
    said = in_world(1, failures, [(2 if name == "two" else 1, ways[number][name]) for number, name in ends])[0]
    for (number, name), sentence in zip(ends, said, strict=True):
        runs[number][name] = Ended({}, traces_in(Path(ways[number][name].run_dir)), sentence)
    rows = [CHECK.rows(one, found) for one, found in zip(jobs, runs, strict=True)]
    promises = {promise.format(2): way for way, promise in PROMISES.items()}
    return [{promises.get(promise, "learns"): found for promise, *found in table} for table in rows]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_each_fault_is_named_and_no_right_net_is_doubted(tmp_path: Path, part: int) -> None:

    animals, problems = [*WRONG, *RIGHT][part::4], []
    for animal, told in zip(animals, tables(animals, tmp_path), strict=True):
        way, words = animal[2:4] or ("", "")
        said = {name: why for name, (holds, why) in told.items() if holds == "no"}
        if words not in said.get(way, "-") if way else said:
            problems.append((animal, told))
    assert not problems, "\n".join(map(str, problems))


def test_rounding_is_no_difference_and_other_bits_are() -> None:
    def trace(stage: str, **values: Any) -> Any:
        return {(1, stage, name): kept(torch.as_tensor(value)) for name, value in values.items()}

    weights = trace("weights", a=torch.ones(3), mask=torch.tensor([-torch.inf, 1.0]), steps=torch.tensor(3))
    one = weights | trace("gradients", a=torch.ones(3, dtype=torch.float64), b=1e-12)
    near = weights | trace("gradients", a=torch.ones(3, dtype=torch.float64), b=-1e-12)
    assert compare(one, [one, near], 1e-6, 5) == (None, pytest.approx(2e-9))
    assert compare(one, [near], 0.0, 5)[0] == (1, "gradients", ["b"], pytest.approx(2e-9))
    moved = near | trace("weights", a=torch.tensor([1.0, 1.0, 1.01]))
    assert compare(one, [near, moved], 1e-6, 5)[0] == (1, "weights", ["a"], pytest.approx(0.01, rel=0.5))
    grown = near | trace("weights", a=torch.ones(4), late=1.0)
    assert compare(one, [grown], 1e-6, 5)[0] == (1, "weights", ["a", "late"], float("inf"))
    large, changed = torch.rand(10**5), torch.rand(1)
    bits = large.clone()
    bits[77] = torch.nextafter(bits[77], changed[0] + 2)
    first, second = trace("weights", a=large), trace("weights", a=bits)
    assert compare(first, [second], 1e-6, 5)[0] is None
    assert compare(first, [second], 0.0, 5)[0] is not None


def test_a_rank_that_another_program_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="type python src/train.py mode=check$"):
        CHECK.validate(None)
