"""What mode=check says of the nets, data, tasks and strategies in `zoo.checked_nets`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config.check import instantiate
from lockstep.config.schema import RunConfig
from lockstep.launchers.local import LocalLauncher
from lockstep.modes.check import PROMISES, Ended, ended
from lockstep.modes.recorder import run, trace_in
from lockstep.modes.train import Train
from support.configs import composed, parts_of, record_of
from support.own_data import Points
from support.worlds import in_world
from zoo.checked_nets import Animal

CHECK = instantiate(composed("mode=check").mode)


def shares(config: RunConfig) -> int:
    strategy: Any = instantiate(config.strategy)
    return strategy.data_share_of(2)


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


def failures(ways: list[tuple[int, RunConfig]]) -> list[tuple[str, bool]]:
    """The sentence of the error that ends each run on so many ranks, and whether it is a known one."""
    torch.set_num_threads(1)
    sentences = []
    for ranks, way in ways:
        launcher = LocalLauncher("fork", ranks)
        end = ended(way, record_of(way), replace(parts_of(way), launcher=launcher, mode=Train()))
        sentences.append((end.failed, end.is_known))
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
            runs[number][name] = Ended(found, trace_in(Path(ways[number][name].run_dir)))
    said = in_world(1, failures, [(2 if name == "two" else 1, ways[number][name]) for number, name in ends])[0]
    for (number, name), (sentence, is_known) in zip(ends, said, strict=True):
        trace = trace_in(Path(ways[number][name].run_dir))
        runs[number][name] = Ended({}, trace, sentence, is_known=is_known)
    rows = [CHECK.rows(one, found) for one, found in zip(jobs, runs, strict=True)]
    promises = {promise.format(2): way for way, promise in PROMISES.items()}
    return [{promises.get(promise, "learns"): found for promise, *found in table} for table in rows]


def misjudged(animals: list[Animal], folder: Path) -> list[tuple[Animal, Any]]:
    """The faults that are not named where they are, and the right nets that are doubted, each with its table."""
    found = []
    for animal, told in zip(animals, tables(animals, folder), strict=True):
        way, words = animal[2:4] or ("", "")
        said = {name: why for name, (holds, why) in told.items() if holds == "no"}
        if words not in said.get(way, "-") if way else said:
            found.append((animal, told))
    return found
