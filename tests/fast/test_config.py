"""Every option in conf/ composes, and its keys are those of its schema and of the class or function that it names."""

import inspect
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.config.check import as_declared, check_arguments, check_config
from lockstep.config.schema import (
    GROUPS,
    NOT_PASSED,
    SECTIONS,
    Dataset,
    Rule,
    Run,
    as_dict,
    default_of,
    join,
    nodes_with_target,
    rules,
    rules_in_conf,
    show,
    values_in_conf,
)
from lockstep.config.targets import instantiate
from lockstep.data.transforms import Augment
from lockstep.distributed.world import init_distributed
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
    "scheduler": {"optimizer", "steps_per_epoch", "total_steps", "objective_mode"},
    "optimizer": {"params"},
}


def combinations() -> Iterator[list[str]]:
    """Overrides that choose every option at least once. A model for images needs a data set of images."""
    groups = [group for group in OPTIONS if group != "dataset"]
    for options in zip_longest(*(OPTIONS[group] for group in groups)):
        words = [f"{group}={option}" for group, option in zip(groups, options, strict=True) if option]
        yield ["dataset=text", *words] if "model=gpt" in words else words
    for option in OPTIONS["dataset"]:
        yield [f"dataset={option}", "model=gpt" if option in ("text", "shard_text") else "model=linear"]


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
def test_the_keys_of_an_option_are_the_parameters_of_its_target(options: list[str]) -> None:
    filled_in = [value for option, values in FILLED_IN.items() if option in options for value in values]
    cfg = cli.resolve(composed(*options, *filled_in))
    check_config(cfg)
    check_arguments(OmegaConf.create(cfg))
    for key, node in nodes_with_target(as_dict(cfg)):
        assert_keys_fit(key, node)


@pytest.mark.parametrize("group", GROUPS)
def test_every_key_of_an_option_has_a_rule_and_a_line_of_help(group: str) -> None:
    """A parameter without a type that a config can hold would be unchecked, and without help undocumented."""
    for option in GROUPS[group]:
        known, values = rules_in_conf(group, option), values_in_conf(group, option)
        keys = set(values[option] if group == "logger" else values) - {"_target_", "_partial_"}
        if group == "dataset":
            keys -= {*rules(Dataset), "train", "test", "augment"}
        assert keys <= set(known), option
        assert [name for name, rule in known.items() if not rule.help] == [], option


def test_the_sections_are_the_parameters_of_what_takes_them() -> None:
    cfg = composed()
    assert set(cfg.backend) | {"bind_device"} == set(inspect.signature(init_distributed).parameters)
    assert {*cfg.dataset.augment, "epochs"} == set(inspect.signature(Augment).parameters)
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


def every_rule() -> Iterator[tuple[str, Rule, object]]:
    """(key, rule, value in conf/) of every field of a section, and of every option's parameter."""
    for name, section in {"": Run, "dataset": Dataset, **SECTIONS}.items():
        for key, rule in rules(section).items():
            yield join(name, key), rule, default_of(join(name, key))
    for group, options in GROUPS.items():
        for option in options:
            values = values_in_conf(group, option)
            for name, rule in rules_in_conf(group, option).items():
                yield f"{group}={option} {name}", rule, values.get(option, values).get(name)


def test_a_field_accepts_its_own_example_and_no_other_type() -> None:
    for key, rule, default in every_rule():
        assert rule.accepts(rule.as_declared(rule.example(default))), key
        assert rule.accepts(None) == rule.nullable, key
        assert not rule.accepts(object()), key
        assert not rule.accepts(float("nan")), key
        assert rule.must_be.endswith(", or null") == rule.nullable, key


def test_the_edges_of_a_range_are_in_or_out_as_the_sentence_says() -> None:
    for key, rule, _ in every_rule():
        limits, whole = rule.limits, float not in rule.kinds
        if rule.is_list or not rule.is_number:
            continue
        step = 1 if whole else 1e-9
        for edge, inside in ((limits.min, 1), (limits.max, -1), (limits.above, 1), (limits.below, -1)):
            if edge is None:
                continue
            included = edge in (limits.min, limits.max)
            assert rule.accepts(int(edge) if whole else edge) == included, key
            assert not rule.accepts((int(edge) if whole else edge) - inside * step), key
            assert limits.must_be or str(edge) in rule.must_be, key
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


def test_whole_numbers_become_floats_where_floats_are_declared() -> None:
    config = as_declared(as_dict(composed("dataset.mean=[0]", "trainer.epochs=2", "trainer.max_grad_norm=1")))
    values = [*config["dataset"]["mean"], config["trainer"]["epochs"], config["trainer"]["max_grad_norm"]]
    assert list(map(repr, values)) == ["0.0", "2", "1.0"]
    cfg = accepted("optimizer=adamw", "optimizer.betas=[0.9,0]", "optimizer.lr=1")
    optimizer = instantiate(cfg.optimizer)
    assert list(map(repr, [*optimizer.keywords["betas"], optimizer.keywords["lr"]])) == ["0.9", "0.0", "1.0"]
    (mixing,) = instantiate(
        OmegaConf.create([{"_target_": "lockstep.data.transforms.MixUp", "alpha": 1, "classes": 2}])
    )
    assert repr(mixing.alpha) == "1.0"
    assert repr(cfg.optimizer.lr) == "1"  # the config stays as it is
