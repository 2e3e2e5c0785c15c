"""Values of a config: every option composes and passes the checks, and a wrong value is refused in one sentence."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml  # type: ignore[import-untyped]

from lockstep.config.check import OPTIONS, check, check_nodes, flatten, nodes_in
from lockstep.config.schema import CONF, RunConfig
from lockstep.errors import ConfigError
from lockstep.text import show
from support.configs import NEEDS, as_composed, composed
from support.refusals import answer

# What is right | the wrong value | what is accepted | what is typed in its place
WRONG = """
 | seed=abc | a valid integer | seed=<value>
 | seed=-1 | greater than or equal to 0 | seed=<value>
 | seed=null | a valid integer | seed=<value>
 | seed=2.5 | a valid integer | seed=<value>
 | optimizer.lr=1.2.3% | a valid number | optimizer.lr=<value>
 | trainer.epochs=0 | greater than or equal to 1 | trainer.epochs=<value>
 | trainer.epochs=true | a valid integer | trainer.epochs=<value>
 | trainer.max_time=30 | a valid string | trainer.max_time=null
 | trainer.max_time=0s | a time such as 90s, 30min or 2h | trainer.max_time=null
 | trainer.compile=fast | a valid boolean or 'reduce-overhead' or 'max-autotune' | trainer.compile=reduce-overhead
 | trainer.ema=1 | an object | trainer.ema=null
 | trainer.max_grad_norm=inf | a finite number | trainer.max_grad_norm=null
 | trainer.max_grad_norm=nan | a finite number | trainer.max_grad_norm=null
 | trainer.checkpoint_activations=block | a valid array | 'trainer.checkpoint_activations=[block]'
 | trainer.final=all | 'train+val' | trainer.final=null
 | evaluation.test=always | 'end', 'every' or 'never' | evaluation.test=end
 | snapshot.every=9 | a valid string | snapshot.every=<value>
 | snapshot.every=0steps | epochs, steps or minutes, such as 50steps | snapshot.every=1epochs
 | snapshot.mirror=s3://bucket | an object | snapshot.mirror=null
 | watch.nan=ignore | 'stop' or 'skip' | watch.nan=stop
 | backend.timeout=0.5 | greater than or equal to 1 | backend.timeout=<value>
 | backend.name=tcp | 'auto', 'gloo', 'nccl' or 'mpi' | backend.name=auto
 | sync_bn.mode=always | 'auto', 'on' or 'off' | sync_bn.mode=auto
 | loader.num_workers=-1 | greater than or equal to 0 | loader.num_workers=<value>
 | loader.sampling=even | 'balanced' or 'weights' | loader.sampling=null
 | dataset.shape=[1,8,0] | greater than or equal to 1 | dataset.shape=null
 | optimizer.lr=high | a valid number | optimizer.lr=<value>
optimizer=adamw | optimizer.betas=0.9 | a valid array | optimizer.betas=<value>
optimizer=adamw | optimizer.betas=[0.9] | longer | optimizer.betas=<value>
model=mlp | model.width=0 | greater than or equal to 1 | model.width=<value>
launch=fork | launch.nproc_per_node=some | a valid integer or 'auto', 'gpu' or 'cpu' | launch.nproc_per_node=auto
 | loader.validation=1.5 | less than 1 | loader.validation=null
"""


@pytest.mark.parametrize("row", WRONG.strip("\n").splitlines())
def test_a_wrong_value_is_answered_with_what_is_accepted_and_a_right_one(row: str) -> None:
    kept, wrong, wanted, advice = (part.strip() for part in row.split(" | "))
    said = str(answer(*kept.split(), wrong))
    key = wrong.partition("=")[0]
    assert said.startswith(f"lockstep: {key}="), said
    assert " should be " in said
    assert wanted in said, said
    typed = said.rpartition("; type ")[2]
    assert typed == advice, said
    assert "<value>" in typed or answer(*kept.split(), typed.strip("'")) is None


# Sections that would together choose something else than what they say.
CONTRADICTIONS = """
loader.folds=5 -> loader.fold=0
loader.folds=5 loader.fold=5 -> loader.fold=0
loader.fold=1 -> loader.folds=5
loader.validation=null trainer.final=train+val -> trainer.final=null
monitor=test/accuracy -> monitor=val/accuracy
monitor=best -> monitor=auto
loader.validation=null monitor=val/loss -> loader.validation=0.1
monitor=val/loss trainer.final=train+val -> trainer.final=null
loader.validation=null evaluation.patience=3 -> evaluation.patience=null
monitor=null scheduler=plateau -> scheduler=cosine
trainer.precision=fp16 watch.nan=skip -> watch.nan=stop
trainer.compile=reduce-overhead trainer.gradient_accumulation_steps=2 -> trainer.compile=true
"""


@pytest.mark.parametrize("row", CONTRADICTIONS.strip().splitlines())
def test_what_contradicts_itself_is_refused(row: str) -> None:
    typed, advice = row.split(" -> ")
    with pytest.raises(ConfigError) as refused:
        composed(*typed.split(), whole=False)
    said = str(refused.value)
    assert said.rpartition("; type ")[2].split(",")[0] == advice, said
    key = advice.partition("=")[0]
    composed(*(word for word in typed.split() if not word.startswith(f"{key}=")), advice, whole=False)


GLOBAL = "# @package _global_\n"
# A preset of the user's | what it is answered with
PRESETS = [
    ("trainer: {epochs: 2}", "is not for the whole config; type # @package _global_ in its first line"),
    (f"{GLOBAL}defaults: [/model: mlp]", "experiment=own cannot be composed; type the command without experiment=own"),
    (f"{GLOBAL}defaults: [override /model: nlp]", "model=nlp is no option, and model has the options "),
    (f"{GLOBAL}trainer: {{epoch: 2}}", "trainer.epoch is no key of this config; type trainer.epochs=2"),
    (f"{GLOBAL}trainer:\n\tepochs: 2", 'own.yaml", line 3, column 1'),
    (f"{GLOBAL}seed: 1\nseed: 2", "found duplicate key seed"),
    (f"{GLOBAL}trainer: {{epochs: 2\nseed: 1", "expected ',' or '}', but got ':'"),
    (f"{GLOBAL}notes: 'open", "found unexpected end of stream"),
]


@pytest.mark.parametrize(("text", "said"), PRESETS)
def test_a_mistake_in_a_preset_is_answered(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(f"{text}\n")
    assert said in str(answer(f"--config-dir={tmp_path}", "experiment=own"))


def test_types_are_strict_and_whole_numbers_are_floats_where_floats_are_declared() -> None:
    config = composed("trainer.epochs=2", "trainer.max_grad_norm=1", "backend.timeout=9")
    values = (config.trainer.epochs, config.trainer.max_grad_norm, config.backend.timeout)
    assert repr(values) == "(2, 1.0, 9.0)"
    for typed in ("trainer.epochs='2'", "trainer.epochs=2.0", "seed=true", "trainer.ema='0.9'", "data_dir=3"):
        assert answer(typed) is not None, typed


def test_a_key_of_the_users_own_stands_below_vars() -> None:
    config = composed("+vars.width=8", "model=mlp", "model.width=${vars.width}", "+vars.of={deep:[1,a]}")
    assert (config.model["width"], config.vars["of"]) == (8, {"deep": [1, "a"]})
    assert "; type +vars.wings=8 for a key of your own" in str(answer("+wings=8"))


def test_the_config_is_frozen_and_a_spawned_process_gets_it_whole() -> None:
    config = composed("experiment=toy_regression")
    with pytest.raises(FrozenInstanceError):
        config.trainer.epochs = 3  # type: ignore[misc]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(config, theirs))
    process.start()
    received = ours.recv()
    assert (received, repr(received)) == (config, repr(config))  # 1 and 1.0 are equal
    process.join()
    changed = config.changed({"trainer.epochs": 99, "model.width": 3, "scheduler": {"_target_": "a.b"}})
    assert (changed.trainer.epochs, changed.model["width"], changed.scheduler) == (99, 3, {"_target_": "a.b"})
    assert config.trainer.epochs != 99


def _answer(config: RunConfig, pipe: Any) -> None:
    pipe.send(config)


def of_sections(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """The keys of the sections of a dataclass."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from of_sections(hints[field.name], f"{prefix}{field.name}.")  # type: ignore[arg-type]
        elif prefix:
            yield f"{prefix}{field.name}"


def test_config_yaml_and_the_dataclasses_have_the_same_keys() -> None:
    written = yaml.safe_load((CONF / "config.yaml").read_text())
    values = as_composed("run_dir=.")
    for key in of_sections(RunConfig):
        section, _, name = key.rpartition(".")
        assert name in values[section], key
    sections = {name for name, hint in get_type_hints(RunConfig).items() if is_dataclass(hint)}
    own = {key for key in flatten(written) if key.partition(".")[0] in sections}
    assert own <= set(of_sections(RunConfig))


CHOICES = [f"{group}={option}" for group, names in OPTIONS.items() for option in names if group != "logger"]
CHOICES += [f"logger=[{option}]" for option in OPTIONS["logger"]]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_composes_and_its_nodes_have_the_arguments_of_their_classes(choice: str) -> None:
    config = composed(choice, *NEEDS.get(choice, []), whole=False)
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, dict):
            assert next(nodes_in(value, field.name), None) or field.name in ("vars", "logger")
            check_nodes(value, field.name)


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_begins_with_its_command(path: Any) -> None:
    package, command = path.read_text().splitlines()[:2]
    assert package == "# @package _global_"
    assert f"experiment={path.stem}:" in command


def test_what_an_optimizer_of_torch_refuses_is_refused_before_any_process_starts() -> None:
    said = str(answer("optimizer=adamw", "optimizer.betas=[0.9,1.5]"))
    assert said.endswith("(Invalid beta parameter at index 1: 1.5); type optimizer=sgd for values of conf/")
    assert "(Nesterov momentum requires " in str(answer("optimizer.momentum=0", "optimizer.nesterov=true"))


def test_a_value_is_shown_as_it_is_typed() -> None:
    values = [None, True, 0.1, 1e-8, [1, "a"], {"a": 1, "b": None}]
    assert list(map(show, values)) == ["null", "true", "0.1", "1e-08", "[1,a]", "{a:1,b:null}"]


def test_a_number_in_an_environment_variable_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "7")
    assert check(as_composed("run_dir=.", "seed='${oc.decode:${oc.env:SEED}}'")).seed == 7
    assert "seed=7 should be a valid integer" in str(answer("seed=${oc.env:SEED}"))
