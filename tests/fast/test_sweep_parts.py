"""The parts of a sweep that need no job: folders, cores and GPUs, which runs count, and what a search draws from."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lockstep.errors import ConfigError
from lockstep.source_code import is_project
from lockstep.sweeps import jobs
from lockstep.sweeps.jobs import divide_machine
from lockstep.sweeps.launch import folder_name, same_values
from lockstep.sweeps.search import as_word, corners, distributions
from support.commands import ROOT


@pytest.mark.parametrize(
    ("changes", "folder"),
    [
        (["model=mlp", "optimizer.lr=0.1"], "model=mlp,optimizer.lr=0.1"),
        (["+model.kind=a"], "model.kind=a"),
        ([], "job"),
        (["model.name=../a b/c"], "model.name=..-a-b-c-"),
        ([f"model.name={'x' * 300}"], f"model.name={'x' * 109}-"),
    ],
)
def test_the_folder_of_a_job_says_what_it_changes(changes: list[str], folder: str) -> None:
    found = folder_name(changes)
    assert found == folder if not folder.endswith("-") else found.startswith(folder)
    assert len(found) <= 130


def test_folders_of_values_that_look_alike_differ() -> None:
    assert len({folder_name([f"model.name={name}"]) for name in ("a b", "a-b", "a/b")}) == 3


def test_the_code_that_starts_a_sweep_is_no_code_of_the_user_s() -> None:
    assert is_project(str(ROOT / "src" / "hydra_plugins" / "lockstep.py"))
    assert is_project(str(ROOT / "src" / "lockstep" / "sweeps" / "launch.py"))
    assert not is_project(str(ROOT / "tests" / "conftest.py"))


def test_jobs_at_once_share_no_core_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "usable_cores", lambda: list(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [sorted(slot.cores) for slot in divide_machine(3, 1)] == [[0, 1], [2, 3], [4, 5]]
    assert [sorted(slot.cores) for slot in divide_machine("auto", 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(divide_machine("auto", "gpu")) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    devices = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in divide_machine("auto", 2)]
    assert devices == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match=r"n_jobs=5 is more than the 4 GPUs .* type hydra.launcher.n_jobs=auto"):
        divide_machine(5, 1)
    with pytest.raises(ConfigError, match="n_jobs=3 of 2 ranks each is more than the 4 GPUs"):
        divide_machine(3, 2)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in divide_machine(2, "gpu")] == ["4,5", "6,7"]


def test_a_container_with_one_gpu_of_several_names_it_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([folder / "nvidia3"]))
    assert jobs.visible_gpus() == ["0"]


VALUES = {"seed": 1, "trainer.epochs": 2, "backend.timeout": 300, "launch._target_": "a", "dataset.classes": None}


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        ({"dataset.classes": 10}, True),  # the data has told
        ({"backend.timeout": 60, "launch._target_": "b", "launch.nproc_per_node": 2, "run_dir": "x"}, True),
        ({"logger.csv.run_dir": "x", "data_dir": "/data", "resume": "y", "tags": ["a"]}, True),
        ({"seed": 2}, False),
        ({"trainer.epochs": 4}, False),
        ({"model.width": 16}, False),
    ],
)
def test_which_values_are_those_of_a_run_that_has_finished(theirs: dict[str, object], same: bool) -> None:
    assert same_values(VALUES, VALUES | theirs) is same


SPACE = {
    "lr=tag(log,interval(0.001,1))": FloatDistribution(0.001, 1.0, log=True),
    "lr=interval(0,1)": FloatDistribution(0, 1),
    "lr=int(interval(16,64))": IntDistribution(16, 64),
    "lr=tag(log,int(interval(16,64)))": IntDistribution(16, 64, log=True),
    "lr=range(1,8,3)": CategoricalDistribution(["1", "4", "7"]),
    "lr=0.1,0.2": CategoricalDistribution(["0.1", "0.2"]),
    "lr=choice(a,b,a)": CategoricalDistribution(["a", "b"]),
    "+lr=range(0.5,2,0.5)": CategoricalDistribution(["0.5", "1.0", "1.5"]),
}


@pytest.mark.parametrize("typed", SPACE)
def test_what_the_words_of_a_search_mean(typed: str) -> None:
    overrides = OverridesParser.create().parse_overrides(["model=mlp", "lr=3", typed])
    fixed, space = distributions(overrides)
    assert fixed == (["model=mlp", "lr=3"] if typed.startswith("+") else ["model=mlp"])
    assert list(space.values()) == [SPACE[typed]]


def test_a_key_typed_twice_has_its_last_value() -> None:
    overrides = OverridesParser.create().parse_overrides(["lr=interval(0,1)", "lr=3"])
    assert distributions(overrides) == (["lr=3"], {})


@pytest.mark.parametrize("typed", ["lr=interval(1.0,0.1)", "lr=tag(log,interval(0.0,0.1))"])
def test_wrong_intervals_are_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"is no interval \(.*; type lr=tag\(log,interval\(0.001,0.1\)\)"):
        distributions(OverridesParser.create().parse_overrides([typed]))


def test_the_corners_of_a_space_are_a_few_jobs() -> None:
    space = {
        "lr": FloatDistribution(0.001, 1.0),
        "size": IntDistribution(16, 64),
        "model": CategoricalDistribution("abc"),
    }
    words = [["lr=0.001", "size=16", "model=a"], ["lr=1", "size=64", "model=b"], ["lr=0.001", "size=16", "model=c"]]
    assert corners(space) == words
    assert as_word(1 / 3) == "0.333333"
