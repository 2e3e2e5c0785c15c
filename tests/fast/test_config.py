"""The config and the command line: every option composes, and a sentence refuses what is wrong."""

import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from itertools import product
from typing import get_type_hints

import pytest
import yaml
from torch import nn

from lockstep import cli
from lockstep.build import job_spec, preflight
from lockstep.config.check import OPTIONS, check, check_nodes, explain, flatten, instantiate, instantiate_as, nodes_in
from lockstep.config.record import config_flags
from lockstep.config.schema import CONF, RunConfig
from lockstep.errors import ConfigError, show
from lockstep.launchers.base import EnvLauncher
from lockstep.tasks.base import Task
from support.configs import NEEDS, as_composed, composed
from support.refusals import accepted, answer

GLOBAL = "# @package _global_\n"
# A preset of the user's | what it is answered with
PRESETS = [
    ("trainer: {epochs: 2}", "is not for the whole config; type # @package _global_ in its first line"),
    ("defaults: [{override /model: mlp}]", "is not for the whole config; type # @package _global_ in its first line"),
    (f"{GLOBAL}defaults: [/model: mlp]", "experiment=own cannot be composed; type the command without experiment=own"),
    (f"{GLOBAL}defaults: [override /model: nlp]", "model=nlp is no option, and model has the options "),
    (f"{GLOBAL}trainer: {{epoch: 2}}", "trainer.epoch is no key of this config; type trainer.epochs=2"),
    (
        f"{GLOBAL}trainer:\n\tepochs: 2",
        "own.yaml is no YAML (found character '\\t' that cannot start any token); correct",
    ),
    (f"{GLOBAL}seed: 1\nseed: 2", "found duplicate key seed"),
    (f"{GLOBAL}notes: 'open", "found unexpected end of stream"),
]


def test_a_mistake_in_a_preset_is_answered(tmp_path):
    for number, (text, said) in enumerate(PRESETS):
        (tmp_path / f"{number}" / "experiment").mkdir(parents=True)
        (tmp_path / f"{number}" / "experiment" / "own.yaml").write_text(f"{text}\n")
        assert said in str(answer(f"--config-dir={tmp_path}/{number}", "experiment=own"))


def test_types_are_strict_and_whole_numbers_are_floats_where_floats_are_declared(monkeypatch, tmp_path):
    config = composed("trainer.epochs=2", "trainer.max_grad_norm=1", "backend.timeout=9")
    values = (config.trainer.epochs, config.trainer.max_grad_norm, config.backend.timeout)
    assert repr(values) == "(2, 1.0, 9.0)"
    for typed in ("trainer.epochs='2'", "trainer.epochs=2.0", "seed=true", "trainer.ema='0.9'", "data_dir=3"):
        assert answer(typed) is not None, typed
    monkeypatch.setenv("SEED", "7")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = check(as_composed("run_dir=.", "seed='${oc.decode:${oc.env:SEED}}'", "data_dir='~/data'"))
    assert (config.seed, config.data_dir) == (7, f"{tmp_path}/data")
    assert "seed=7 should be a valid integer" in str(answer("seed=${oc.env:SEED}"))
    shown = [None, True, 0.1, 1e-8, [1, "a"], {"a": 1, "b": None}]
    assert list(map(show, shown)) == ["null", "true", "0.1", "1e-08", "[1,a]", "{a:1,b:null}"]


def test_a_key_of_the_users_own_stands_below_vars_and_a_config_is_frozen():
    config = composed("+vars.width=8", "model=mlp", "model.width=${vars.width}", "+vars.of={deep:[1,a]}")
    assert (config.model["width"], config.vars["of"]) == (8, {"deep": [1, "a"]})
    assert "; type +vars.wings=8 for a key of your own" in str(answer("+wings=8"))
    with pytest.raises(FrozenInstanceError):
        config.trainer.epochs = 3
    assert repr(pickle.loads(pickle.dumps(config))) == repr(config)  # 1 and 1.0 are equal
    changed = config.changed({"trainer.epochs": 99, "model.width": 3, "scheduler": {"_target_": "a.b"}})
    assert (changed.trainer.epochs, changed.model["width"], changed.scheduler) == (99, 3, {"_target_": "a.b"})
    assert config.trainer.epochs != 99


def test_config_yaml_and_the_dataclasses_have_the_same_keys_and_a_preset_begins_with_its_command():
    hints = {name: hint for name, hint in get_type_hints(RunConfig).items() if is_dataclass(hint)}
    declared = {f"{name}.{field.name}" for name, hint in hints.items() for field in fields(hint)}
    written = flatten(yaml.safe_load((CONF / "config.yaml").read_text()))
    assert {key for key in written if key.partition(".")[0] in hints} <= declared
    values = as_composed("run_dir=.")
    assert all(key.partition(".")[2] in values[key.partition(".")[0]] for key in declared)
    for path in (CONF / "experiment").glob("*.yaml"):
        package, command = path.read_text().splitlines()[:2]
        is_named = f"experiment={path.stem}:" in command or "experiment=" not in command
        assert (package, is_named) == ("# @package _global_", True), path


CHOICES = [f"{group}={option}" for group, names in OPTIONS.items() for option in names if group != "logger"]
CHOICES += [f"logger=[{option}]" for option in OPTIONS["logger"]]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_composes_and_its_nodes_have_the_arguments_of_their_classes(choice):
    config = composed(choice, *NEEDS.get(choice, []), whole=False)
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, dict):
            assert next(nodes_in(value, field.name), None) or field.name in ("vars", "logger")
            check_nodes(value, field.name)


# ---- Nodes: what a `_target_` names, the arguments that it takes, and the object that it makes.


class Net(nn.Module):
    def __init__(self, shape, classes, width, depth=2):
        super().__init__()
        if width > 99:
            raise ValueError("too wide")
        self.width, self.depth = width, depth


NET = "model._target_=test_config.Net"
NOT_THERE = "PYTHONPATH=<the folder of nothere_at_all.py> before the command, or pip install nothere_at_all"
BROKEN = [
    ("import nothere_at_all", "No module named 'nothere_at_all'", NOT_THERE),
    ("raise SystemExit(3)", "SystemExit: 3", "model._target_=<module>.<class>"),
    ("1 / 0", "ZeroDivisionError: division by zero", "model._target_=<module>.<class>"),
    ("def", "SyntaxError: invalid syntax", "model._target_=<module>.<class>"),
]


def test_an_error_of_the_import_is_in_the_sentence(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, (module, reason, advice) in enumerate(BROKEN):
        (tmp_path / f"broken_{number}.py").write_text(f"{module}\n")
        said = str(answer(f"model._target_=broken_{number}.Net"))
        assert reason in said
        assert said.endswith(f"; type {advice}")
    assert str(answer("model._target_=src.nets.Net")).endswith("; type model._target_=nets.Net")


def test_what_a_constructor_raises_is_what_is_raised():
    assert accepted(NET, "+model.width=wide").model["width"] == "wide"  # values of other classes are theirs
    node = {"_target_": "test_config.Net", "shape": [1], "classes": 2}
    for given, later in (({"width": 100}, {}), ({}, {"width": 100})):
        with pytest.raises(ValueError, match=r"^too wide$") as raised:
            instantiate(node | given, **later)
        assert explain(raised.value, []) is None  # it keeps its traceback
    with pytest.raises(ConfigError, match=r"an object of Net, and lockstep.tasks.base.Task or \S+Linear is wanted; "):
        instantiate_as(Task | nn.Linear, node | {"width": 1}, "task")
    assert instantiate(None) is None
    assert [made.depth for made in instantiate([node | {"width": 1, "depth": 3}] * 2)] == [3, 3]
    assert instantiate_as(nn.Module, node, "model", width=2, other=3).width == 2  # what is not taken is not passed


def test_a_flag_is_one_word_with_its_value_and_a_mode_without_a_record_is_refused(tmp_path):
    words = ["seed=1", "-cd", "own", "-m", "~a", "trainer.epochs", "--cfg=job", "-cn=c", "--config-path", "d", "b=2"]
    found = cli.words_of(words)
    flags = ["--config-dir=own", "--config-name=c", "--config-path=d"]
    assert found == ["seed=1", flags[0], "-m", "~a", "trainer.epochs", "--cfg=job", *flags[1:], "b=2"]
    assert config_flags([*found, "hydra.searchpath=[d]"]) == [*flags, "hydra.searchpath=[d]"]
    assert cli.with_overrides_of_run([]) == []
    with pytest.raises(ConfigError, match="is in no run folder"):
        cli.with_overrides_of_run(["mode=evaluate", f"resume={tmp_path}"])


def test_a_mode_takes_the_words_of_the_run_but_not_how_it_was_spread_and_saved(tmp_path):
    taken = ["dataset=text", "model=gpt", "model.width=8", "trainer.precision=fp64", "+experiment=x"]
    words = ["strategy=fsdp", "snapshot.keep_last=2", "backend=nccl", "watch.nan=skip"]
    words += ["launch=fork", "launch.nproc_per_node=2", "logger=[csv]", "trainer.compile=true"]
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(taken + words))
    (run / ".hydra" / "config.yaml").write_text("{}")
    places = (run, run / "snapshots", run / "snapshots" / "step_1")
    for mode, resume in product(("evaluate", "predict", "export", "sample"), places):
        typed = [f"mode={mode}", f"resume={resume}"]
        assert cli.with_overrides_of_run(typed) == [*taken, f"hydra.run.dir={run / mode}", *typed]
    typed = ["mode=sample", f"resume={run}", "model=mlp", "hydra.run.dir=out"]
    assert cli.with_overrides_of_run(typed) == [taken[0], *taken[3:], *typed]


THREE, COMPILED, FP16 = "launch=spawn launch.nproc_per_node=3", "trainer.compile=true", "trainer.precision=fp16"
AUTO, BF16, EAGER = "gradient_sync=auto, or strategy=ddp", "trainer.precision=bf16", "trainer.compile=false"
ONE = "strategy.replicate=1 and strategy.shard=1, or strategy=ddp"
EACH = {"sync_bn=on": "sync_bn=off", FP16: BF16}
TOGETHER = {  # {what is typed: {what else: what is said to type}}
    "strategy=data_parallel": {"sync_bn=on": "sync_bn=off", "launch=spawn": "strategy=ddp", COMPILED: EAGER},
    "strategy=fsdp": {
        "gradient_sync=bf16": "gradient_sync=auto",
        f"strategy.replicate=2 {THREE}": "strategy.replicate=1",
    },
    "strategy=pipeline": EACH | {COMPILED: EAGER},
    "strategy=tensor_parallel model=mlp": EACH
    | {"gradient_sync=ring": AUTO, COMPILED: EAGER}
    | {f"strategy.replicate={number} {THREE}": ONE for number in (2, 3)},
    "strategy=virtual_ranks": {"gradient_sync=ring": AUTO, "sync_bn=on": "sync_bn=off", THREE: "strategy.count=6"}
    | {"trainer.gradient_accumulation_steps=2": "trainer.gradient_accumulation_steps=1"},
    f"strategy=async_parameter_server {THREE}": EACH
    | {"gradient_sync=ring": AUTO, "watch.nan=skip": "watch.nan=stop"}
    | {"trainer.deterministic=true": "trainer.deterministic=false", "snapshot.every=5steps": "snapshot.every=1epochs"},
    "strategy=async_parameter_server": {"launch=env": THREE},
    "gradient_sync=powersgd": {"watch.nan=skip": "watch.nan=stop"},
    "trainer.batch_size=2": {THREE: "trainer.batch_size=3"},
}


def test_what_does_not_go_together_is_refused():
    for typed, others in TOGETHER.items():
        for other, said in others.items():
            with pytest.raises(ConfigError) as refused:
                preflight(composed(*typed.split(), *other.split()))
            assert f"type {said}" in str(refused.value), (typed, other)
    strategy = instantiate(composed("strategy=virtual_ranks").strategy)
    plain, deterministic = (
        job_spec(composed(f"trainer.deterministic={value}"), EnvLauncher()) for value in ("false", "true")
    )
    for job in (plain, deterministic, replace(deterministic, on_gpus=True)):
        strategy.validate(job)
    with pytest.raises(ConfigError, match="type trainer.deterministic=true"):
        strategy.validate(replace(plain, on_gpus=True))
