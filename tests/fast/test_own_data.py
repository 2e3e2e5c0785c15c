"""Data sets of the user's own whose YAML has nothing but a `_target_`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data import build as build_data
from lockstep.data.loader import require_channels
from lockstep.errors import ConfigError
from lockstep.modes.train import Train
from support.configs import composed, with_values
from support.refusals import accepted
from support.worlds import distance, in_world, train_all, weights

NOTHING_SAID = ["dataset.shape=null", "dataset.classes=null", "dataset.mean=null", "dataset.std=null"]


def halves(name: str, *arguments: str) -> list[str]:
    """The words for a data set of support.own_data for both halves."""
    words = [f"dataset.{half}._target_=support.own_data.{name}" for half in ("train", "test")]
    return [*NOTHING_SAID, *words, *arguments]


def own(name: str, *overrides: str) -> Any:
    """A config with the data set `name` of support.own_data for both halves."""
    base = ["model=mlp", "trainer.precision=fp64", "logger=[]", "trainer.batch_size=6", "trainer.epochs=2"]
    return composed(*base, "scheduler=constant", *halves(name), *overrides)


def completed(config: Any) -> Any:
    return build_data.completed(config, train_data(config))


def train_data(config: Any) -> Any:
    return build_data.datasets(config, Train()).train


@pytest.mark.parametrize("name", ["Named", "tensors"])
def test_a_model_is_built_for_the_shape_and_the_classes_of_the_data(name: str) -> None:
    config = completed(own(name))
    assert (config.model["shape"], config.model["classes"]) == ([4], 2)


def test_whole_numbers_are_values_of_a_regression(tmp_path: Path) -> None:
    """Also negative ones, and in the tests larger ones than the training has."""
    words = ["model=mlp", "task=regression", "logger=[]", "trainer.max_steps=2", f"run_dir={tmp_path}"]
    most = ["+dataset.train.most=9", "+dataset.test.most=20"]
    config = composed(*words, *halves("counts", *most))
    assert completed(config).model["classes"] == 1
    in_world(1, train_all, [config])


def test_a_task_counts_as_many_labels_as_a_target_has(tmp_path: Path) -> None:
    words = ["model=mlp", "task=multi_label", "logger=[]", "trainer.max_steps=1", f"run_dir={tmp_path}"]
    config = accepted(*words, "loader.validation=null", *halves("Labelled"))
    assert completed(config).task["classes"] == 4
    in_world(2, train_all, [config])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Empty", "the training data has no samples; check the keys of dataset.train"),
        ("NamedTargets", "does not say how many classes it has; type dataset.classes=<how many>"),
        ("Points", "does not say how many classes it has; type dataset.classes=<how many>"),
        ("Pairs", "the samples have several inputs, and this model has a key for one shape"),
        ("Triples", "a sample of the training data has 3 values"),
    ],
)
def test_data_that_says_too_little_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        completed(own(name))


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_number_for_each_channel_is_wanted_where_the_data_tells_the_shape(name: str) -> None:
    completed(own("Named", f"dataset.{name}=[1, 1, 1, 1]"))
    with pytest.raises(ConfigError, match=rf"dataset.{name} has 3 numbers, and .* the shape \[4\]; type "):
        completed(own("Named", f"dataset.{name}=[1, 1, 1]"))
    with pytest.raises(ConfigError, match=rf"dataset.{name} has 1 number, .* type dataset.{name}=\[0.5,0.5,0.5\] "):
        require_channels(torch.zeros(2, 3, 4, 4), **{name: [0.5]})


@pytest.mark.parametrize("name", ["training data", "test data"])
def test_data_of_which_nothing_can_be_read_is_refused_at_the_start(name: str) -> None:
    cfg = own("AllBroken", "loader.on_error=skip")
    said = f"none of 23 samples of the {name} that were tried can be read; sample 0 .* no such disk; correct that, or"
    with pytest.raises(ConfigError, match=said):
        build_data.samples(cfg, train_data(cfg), name)


def test_a_batch_without_some_of_its_samples_is_refused_by_a_task_that_counts_samples() -> None:
    collate = "loader.collate_fn={_target_:support.own_data.without_the_first}"
    for task, refused in (("classification.Classification", True), ("language_modelling.LanguageModelling", False)):
        config = own("Named", collate, f"task._target_=lockstep.tasks.{task}")
        samples = build_data.samples(config, train_data(config), "training data")
        found = samples.collate(samples.__getitems__([(0, 0), (0, 1)]))
        assert isinstance(found, ConfigError) is refused


def test_own_random_data_trains_alike_at_any_ranks_and_workers_and_after_a_resume(tmp_path: Path) -> None:
    def configs(*names: str) -> list[Any]:
        return [own("Noisy", "dataset.classes=2", f"run_dir={tmp_path / name}") for name in names]

    (alone,) = configs("alone")
    paused, shared = configs("resumed", "shared")
    in_world(1, train_all, [alone, with_values(paused, "trainer.max_steps=3")])
    in_world(2, train_all, [with_values(shared, "loader.num_workers=2"), paused])
    expected = weights(tmp_path / "alone")
    assert distance(expected, weights(tmp_path / "shared")) < 1e-12
    assert distance(expected, weights(tmp_path / "resumed")) < 1e-12
