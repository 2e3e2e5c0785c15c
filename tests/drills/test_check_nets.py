"""mode=check names each fault of `zoo.checked_nets` where it is, and doubts no right net."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from lockstep.config.check import instantiate
from lockstep.data.build import prepare_first
from lockstep.modes.check import PROMISES, Ended, ended, run, trace_in
from lockstep.modes.train import Train
from support.commands import PYTHON_TRAIN, own_data
from support.configs import composed, parts_of, record_of
from support.own_data import Points
from support.worlds import in_world
from zoo.checked_nets import RIGHT, WRONG
from zoo.modules import BODIES

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]
CHECK = instantiate(composed("mode=check").mode)
HOOKS = (modules._global_forward_pre_hooks, modules._global_forward_hooks, optimizers._global_optimizer_pre_hooks)


def job(animal):
    """The job of an animal. A class among its words is that of the data; without a net they are all."""
    model, more, *_ = animal
    words = [word for word in more if isinstance(word, str)]
    if isinstance(model, str) and model not in BODIES:
        return composed(*words).changed({"trainer.precision": "fp64"})
    words += ["dataset=pair", "trainer.batch_size=14", "model=linear", "evaluation.test=every"]
    words += ["trainer.precision=fp64"]
    if isinstance(model, str):
        words += [*own_data("zoo.data.make"), "+dataset.train.kind=tensors", "+dataset.test.kind=tensors"]
        words += [
            "dataset.classes=4",
            "dataset.shape=[1,6,6]",
            "model._target_=zoo.modules.net",
            f"+model.body={model}",
        ]
        return composed(*words)
    data = next((word for word in more if isinstance(word, type)), Points)
    words += [f"dataset.{split}._target_={data.__module__}.{data.__name__}" for split in ("train", "test")]
    words += [f"model._target_={model.__module__}.{model.__name__}", "dataset.classes=2", "dataset.shape=[4]"]
    return composed(*words)


def trained(ways):
    """In a rank: each run, one after the other."""
    torch.set_num_threads(1)
    for way in ways:
        Path(way.run_dir).mkdir(parents=True, exist_ok=True)
        run(way, record_of(way), replace(parts_of(way), mode=Train()))
        for hooks in HOOKS:
            hooks.clear()


def failures(ways):
    """The sentence of the error that ends each run on so many ranks."""
    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)  # it starts ranks itself
    return [ended(way, record_of(way), ranks).failed for ranks, way in ways]


def tables(animals, folder):
    """{way: (whether its promise holds, why)} of each animal: of a wrong one its own way alone. The runs of all animals
    share a world for each way, but for those that end with an error."""
    jobs = [job(animal) for animal in animals]
    places, ends = {}, []  # {(number of the animal, way): config}
    for number, (one, animal) in enumerate(zip(jobs, animals, strict=True)):
        prepare_first(one)
        ways = CHECK.ways(one, instantiate(one.strategy).data_share_of(2), folder / str(number))
        names = ("one", *(animal[2:3] or ways))
        places |= {(number, name): way for name, way in ways.items() if name in names}
        ends += [(number, animal[2])] if animal[4:] else []
    for ranks, names in ((1, ("one",)), (1, ("again", "compiled")), (1, ("resumed", "cut")), (2, ("two",))):
        chosen = [way for key, way in places.items() if key[1] in names and key not in ends]
        in_world(ranks, trained, chosen, limit=900)
    said = in_world(1, failures, [(2 if key[1] == "two" else 1, places[key]) for key in ends], limit=900)[0]
    failed, runs = dict(zip(ends, said, strict=True)), [{} for _ in jobs]
    for (number, name), way in places.items():
        runs[number][name] = Ended(trace_in(Path(way.run_dir)), failed=failed.get((number, name), ""))
    rows = [CHECK.rows(one, found) for one, found in zip(jobs, runs, strict=True)]
    promises = {promise.format(2): way for way, promise in PROMISES.items()}
    return [{promises.get(promise, "learns"): found for promise, *found in table[:-1]} for table in rows]


def misjudged(animals, folder):
    """The faults that are not named where they are, and the right nets that are doubted, each with its table."""
    found = []
    for animal, told in zip(animals, tables(animals, folder), strict=True):
        way, words = animal[2:4] or ("", "")
        said = {name: why for name, (holds, why) in told.items() if holds == "no"}
        if words not in said.get(way, "-") if way else said:
            found.append((animal, told))
    return found


@pytest.mark.parametrize("part", range(4))
def test_each_fault_is_named_and_no_right_net_is_doubted(tmp_path, part):
    nets = [*WRONG, *RIGHT]
    chosen = nets if os.environ.get("LOCKSTEP_NETS") == "all" else nets[::2]  # `make matrices` checks all
    assert misjudged(chosen[part::4], tmp_path) == []


def test_a_deep_net_whose_rounding_errors_grow_is_compared_in_float64(start):
    output = start(*PYTHON_TRAIN, "mode=check", "model=resnet18").finish(limit=600).output
    (numbers,) = [line for line in output.splitlines() if line.startswith("the same numbers on 2 ranks")]
    assert "  yes  " in numbers
    assert numbers.endswith("(in float64)")
