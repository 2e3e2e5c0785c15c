"""The parts of a sweep that need no job: folders, cores and GPUs, which runs count, and what a search draws from."""

import os

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lockstep.source_code import is_project
from lockstep.sweeps.jobs import divide_machine
from lockstep.sweeps.launch import folder_name, is_at_edge, same_values
from lockstep.sweeps.search import distributions, overrides_of
from support.commands import ROOT


def test_the_folder_of_a_job_says_what_it_changes():
    assert folder_name(["model=mlp", "optimizer.lr=0.1"]) == "model=mlp,optimizer.lr=0.1"
    assert [folder_name(["+model.kind=a"]), folder_name([])] == ["model.kind=a", "job"]
    assert folder_name(["model.name=../a b/c"]).startswith("model.name=..-a-b-c-")
    assert len(folder_name([f"model.name={'x' * 300}"])) <= 130
    assert len({folder_name([f"model.name={name}"]) for name in ("a b", "a-b", "a/b")}) == 3  # they look alike


def test_the_code_that_starts_a_sweep_is_no_code_of_the_user_s():
    names = ("src/hydra_plugins/lockstep.py", "src/lockstep/sweeps/launch.py", "tests/conftest.py")
    assert [is_project(str(ROOT / name)) for name in names] == [True, True, False]


def test_jobs_at_once_share_no_core_and_no_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [cores for cores, _ in divide_machine(3)] == [[0, 1], [2, 3], [4, 5]]
    assert divide_machine(1) == [([], [])]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [gpus for _, gpus in divide_machine(2)] == [["4", "5"], ["6", "7"]]
    assert [gpus for _, gpus in divide_machine(5)] == [["4"], ["5"], ["6"], ["7"], ["4"]]


def test_which_values_are_those_of_a_run_that_has_finished():
    values = {"seed": 1, "trainer.epochs": 2, "backend.timeout": 300, "launch._target_": "a", "dataset.classes": None}
    for same in (
        {"dataset.classes": 10},  # the data has told
        {"backend.timeout": 60, "launch._target_": "b", "launch.nproc_per_node": 2, "run_dir": "x"},
        {"logger.csv.run_dir": "x", "data_dir": "/data", "resume": "y", "tags": ["a"]},
    ):
        assert same_values(values, values | same), same
    for other in ({"seed": 2}, {"trainer.epochs": 4}, {"model.width": 16}):
        assert not same_values(values, values | other), other


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr=tag(log,interval(0.001,1))", FloatDistribution(0.001, 1.0, log=True)),
        ("lr=interval(0,1)", FloatDistribution(0, 1)),
        ("lr=int(interval(16,64))", IntDistribution(16, 64)),
        ("lr=tag(log,int(interval(16,64)))", IntDistribution(16, 64, log=True)),
        ("lr=range(1,8,3)", CategoricalDistribution(["1", "4", "7"])),
        ("lr=0.1,0.2", CategoricalDistribution(["0.1", "0.2"])),
        ("lr=choice(a,b,a)", CategoricalDistribution(["a", "b"])),
        ("+lr=range(0.5,2,0.5)", CategoricalDistribution(["0.5", "1.0", "1.5"])),
    ],
)
def test_what_the_overrides_of_a_search_mean(typed, meant):
    """Of a key typed twice the last value counts, and numbers have six digits."""
    fixed, space = distributions(OverridesParser.create().parse_overrides(["model=mlp", "lr=3", typed]))
    assert fixed == (["model=mlp", "lr=3"] if typed.startswith("+") else ["model=mlp"])
    assert [*space.values()] == [meant]
    assert distributions(OverridesParser.create().parse_overrides([typed, typed.partition("=")[0] + "=3"]))[1] == {}
    assert overrides_of({"lr": 1 / 3, "size": 16, "model": "a"}) == ["lr=0.333333", "size=16", "model=a"]


def test_the_best_value_of_a_list_may_be_at_its_edge():
    lists = ([3, 1, 2], [1, 2, 3], [2, 1, 3], [1, 2], [True, False, 1], ["a", "b", "c"], [0.1, "auto", 0.2, 0.3])
    assert [is_at_edge(values) for values in lists] == [True, True, False, False, False, False, True]
