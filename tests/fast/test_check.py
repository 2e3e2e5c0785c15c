"""What mode=check says of nets, data, tasks and strategies. tests/runs/test_check_commands.py runs whole commands."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.launchers.local import SpawnLauncher
from lockstep.modes.check import PROMISES, Check, Ended, Row, take
from lockstep.modes.recorder import compare, kept, run, traces_in
from lockstep.modes.train import Train
from support.configs import composed, parts_of, record_of
from support.own_data import Points
from support.worlds import in_world
from zoo.checked_nets import RIGHT, WRONG, Animal


def job(animal: Animal) -> RunConfig:
    """The job of an animal. A class among its words is that of the data."""
    model, more, *_ = animal
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


def launched(ways: list[tuple[int, RunConfig]]) -> list[str]:
    """The sentence of the error that ends each run on so many ranks."""
    torch.set_num_threads(1)
    ended = []
    for ranks, way in ways:
        launcher = SpawnLauncher("fork", ranks, 1, 0, "127.0.0.1", 0)
        ended.append(take(way, record_of(way), replace(parts_of(way), launcher=launcher, mode=Train())))
    return [one.failed for one in ended]


def tables(animals: list[Animal], folder: Path) -> list[list[Row]]:
    """The table of each animal: of a wrong one with its row alone. All runs of one kind share a world, but for those
    that end with an error."""
    check, jobs = Check(5, 2), [job(animal).changed({"trainer.precision": "fp64"}) for animal in animals]
    ways = [check.ways(one, 2, folder / str(number)) for number, one in enumerate(jobs)]
    runs: list[dict[str, Ended]] = [{} for _ in jobs]
    ends = [(number, animals[number][2]) for number in range(len(jobs)) if animals[number][4:]]
    for names, ranks in ((["one"], 1), (["again"], 1), (["resumed", "cut"], 1), (["two"], 2)):
        chosen = [(number, name) for number, animal in enumerate(animals) for name in names
                  if (name == "one" or name in animal[2:3] or not animal[2:]) and (number, name) not in ends]
        facts, *_ = in_world(ranks, taken, [ways[number][name] for number, name in chosen], limit=600)
        for (number, name), found in zip(chosen, facts, strict=True):
            runs[number][name] = Ended(found, traces_in(Path(ways[number][name].run_dir)))
    failed = in_world(1, launched, [(2 if name == "two" else 1, ways[number][name]) for number, name in ends])[0]
    for (number, name), sentence in zip(ends, failed, strict=True):
        runs[number][name] = Ended({}, traces_in(Path(ways[number][name].run_dir)), sentence)
    return [check.rows(one, found) for one, found in zip(jobs, runs, strict=True)]


@pytest.mark.timeout(900)
def test_each_fault_is_named_in_its_row_and_no_right_net_is_doubted(tmp_path: Path) -> None:
    animals = [*WRONG, *RIGHT]
    problems = []
    for animal, rows in zip(animals, tables(animals, tmp_path), strict=True):
        told = dict(zip([name for name in PROMISES if name in animal[2:3] or not animal[2:]] + ["learns"], [(holds, why) for _, holds, why in rows], strict=False))
        wanted, part = animal[2:4] or ("", "")
        no = {name: why for name, (holds, why) in told.items() if holds == "no"}
        if (part not in no.get(wanted, "-")) if wanted else no:
            problems.append((animal, told))
        print(animal[0].__name__, animal[1:], "->", told)
    assert not problems, "\n".join(map(str, problems))
