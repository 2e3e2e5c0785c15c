"""Every option in conf/ composes, and its keys are those of its schema and of the class or function that it names."""

import inspect
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.config.check import check_config, unchecked_keys, with_floats
from lockstep.config.options import DATASETS, GROUPS, TARGETS
from lockstep.config.schema import OPEN_SECTIONS, SECTIONS, Rule, Run, as_dict, nodes_with_target, rules, show
from lockstep.config.suggest import unknown_key  # noqa: F401  (adds the options of all groups to GROUPS)
from lockstep.config.targets import NOT_PASSED
from lockstep.data.transforms import Augment
from lockstep.distributed.world import init_distributed
from lockstep.training.schedulers import constant
from lockstep.training.step_records import StepProfiler
from support.commands import ROOT
from support.configs import composed
from support.refusals import accepted

CONF = ROOT / "conf"
OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("hydra", "local", "experiment")
}
PRESETS = sorted((CONF / "experiment").glob("*.yaml"))
FILLED_IN = {
    "dataset=image_folder": ["dataset.classes=2"],
    "launch=slurm": ["launch.overrides=[]"],
}  # by a person, or by Hydra
PASSED_BY_TRAIN = {
    "scheduler": set(inspect.signature(constant).parameters) | {"objective_mode"},
    "optimizer": {"params"},
}


def combinations() -> Iterator[list[str]]:
    """Overrides that choose every option at least once. A model for images needs a data set of images."""
    groups = [group for group in OPTIONS if group != "dataset"]
    for options in zip_longest(*(OPTIONS[group] for group in groups)):
        yield [f"{group}={option}" for group, option in zip(groups, options, strict=True) if option]
    for option in OPTIONS["dataset"]:
        yield [f"dataset={option}", "model=linear"]


def assert_keys_fit(key: str, node: Any) -> None:
    """The node has every parameter of what its `_target_` names, and no other key."""
    names = {name for name in node if not name.startswith("_")} - NOT_PASSED.get(key, frozenset())
    parameters = dict(inspect.signature(get_object(node["_target_"])).parameters)
    if not node["_target_"].startswith("lockstep."):
        assert names <= set(parameters), key
        return
    takes_any = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    needed = set(parameters) - set(takes_any) - PASSED_BY_TRAIN.get(key, set())
    assert needed <= names if takes_any else needed == names, key
    defaults = [name for name in needed if parameters[name].default is not inspect.Parameter.empty]
    assert defaults == [], f"{key}: a number hides in the code"


@pytest.mark.parametrize("options", list(combinations()), ids=" ".join)
def test_the_keys_of_an_option_are_those_of_its_schema_and_of_its_target(options: list[str]) -> None:
    filled_in = [value for option, values in FILLED_IN.items() if option in options for value in values]
    cfg = cli.resolve(composed(*options, *filled_in))
    check_config(cfg)
    assert unchecked_keys(cfg) == []
    for key, node in nodes_with_target(as_dict(cfg)):
        assert_keys_fit(key, node)


def test_every_option_stands_in_the_schema_and_every_schema_in_conf() -> None:
    described = {(group, option) for group, options in GROUPS.items() for option in options}
    assert described == {(group, option) for group, options in OPTIONS.items() for option in options}


def test_the_sections_are_the_parameters_of_what_takes_them() -> None:
    cfg = composed()
    assert set(cfg.backend) | {"bind_device"} == set(inspect.signature(init_distributed).parameters)
    assert set(cfg.dataset.augment) == set(inspect.signature(Augment).parameters)
    assert set(cfg.profiler) - {"enabled"} <= set(inspect.signature(StepProfiler).parameters)


def test_no_option_of_a_switch_is_read_as_a_truth_value() -> None:
    for option in ("on", "off", "auto"):
        assert OmegaConf.load(CONF / "sync_bn" / f"{option}.yaml").mode == option


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_begins_with_its_command_and_passes_the_checks(path: Any) -> None:
    package, command = path.read_text().splitlines()[:2]
    assert package == "# @package _global_"
    assert f"experiment={path.stem}:" in command
    check_config(cli.resolve(composed(f"experiment={path.stem}")))


def every_rule() -> Iterator[tuple[str, Rule]]:
    """(key, rule) of every field of every schema."""
    schemas = {"": Run, **SECTIONS, **OPEN_SECTIONS, **TARGETS, **DATASETS}
    for name, schema in schemas.items():
        for key, rule in rules(schema).items():
            yield f"{name}:{key}", rule


def test_a_field_accepts_its_own_example_and_no_other_type() -> None:
    for key, rule in every_rule():
        example, limits = rule.limits.example, rule.limits
        assert limits.help.endswith("."), key
        if not str(example).startswith("${"):  # an interpolation is resolved before it is checked
            assert rule.accepts(None if example == "null" else example), key
        assert rule.accepts(None) == rule.nullable, key
        assert not rule.accepts(object()), key
        assert not rule.accepts(float("nan")), key
        assert rule.wants.endswith(", or null") == rule.nullable, key


def test_the_edges_of_a_range_are_in_or_out_as_the_sentence_says() -> None:
    for key, rule in every_rule():
        limits, whole = rule.limits, rule.kind is int
        if rule.is_list or rule.kind not in (int, float):
            continue
        step = 1 if whole else 1e-9
        for edge, inside in ((limits.min, 1), (limits.max, -1), (limits.above, 1), (limits.below, -1)):
            if edge is None:
                continue
            included = edge in (limits.min, limits.max)
            assert rule.accepts(int(edge) if whole else edge) == included, key
            assert not rule.accepts((int(edge) if whole else edge) - inside * step), key
            assert limits.wants or str(edge) in rule.wants, key
        if whole:
            assert not rule.accepts(1.5), key
            assert not rule.accepts(True), key


def test_a_value_is_shown_as_it_is_typed() -> None:
    values = [None, True, 0.1, 3.0, 1e-8, 1e300, [1, "a"], {"a": 1, "b": None}]
    assert [show(value) for value in values] == [
        "null",
        "true",
        "0.1",
        "3",
        "1e-08",
        "1e+300",
        "[1,a]",
        "{a:1,b:null}",
    ]


def test_whole_numbers_become_floats_where_floats_are_wanted() -> None:
    words = ["optimizer=adamw", "optimizer.betas=[0.9,0]", "optimizer.lr=1", "dataset.mean=[0]", "trainer.epochs=2"]
    config = with_floats(as_dict(accepted(*words)))
    optimizer, dataset = config["optimizer"], config["dataset"]
    numbers = [*optimizer["betas"], optimizer["lr"], *dataset["mean"], config["trainer"]["epochs"]]
    assert list(map(repr, numbers)) == ["0.9", "0.0", "1.0", "0.0", "2"]
