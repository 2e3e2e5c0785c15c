"""YAML files of the user's own: what Hydra leaves out or explains in its own words is answered with what to type."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException

from lockstep import cli
from lockstep.compat import hydra_version_base
from lockstep.config.check import check_config
from lockstep.config.suggest import unknown_key
from lockstep.errors import ConfigError
from lockstep.hydra_errors import as_config_error
from support.commands import ROOT
from support.configs import composed
from support.refusals import accepted, answer

GLOBAL = "# @package _global_\n"
NO_PACKAGE = 'which nothing reads; type "# @package _global_" as the first line of its file'
NOT_ON_CONFIG = "does not build on config.yaml; type `defaults: [config, _self_]` at the top of its file"


def preset(folder: Path, text: str, group: str = "experiment") -> list[str]:
    """The words that choose an own option with this text."""
    (folder / group).mkdir()
    (folder / group / "own.yaml").write_text(text, encoding="latin1")
    return [f"hydra.searchpath=[file://{folder}]", f"{group}=own"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer: {epochs: 2}", NO_PACKAGE),
        ("[trainer, 2]", NO_PACKAGE),
        ("defaults: [override /model: mlp]", NO_PACKAGE),
        (f"{GLOBAL}defaults: [override /modle: mlp]", "modle is no key of this config; type model=<value>"),
        (f"{GLOBAL}defaults: [override model: mlp]", "is no config group; type `override /model: <option>` in the"),
        (f"{GLOBAL}model: mlp", "is a section, not a value; type `override /model: mlp` in the defaults list of its"),
        (f"{GLOBAL}backend: gloo", "is a section, not a value; type `override /backend: gloo` in the defaults list"),
        ("# caf\xe9", "experiment/own.yaml is no text in UTF-8 ("),
    ],
)
def test_a_preset_that_changes_nothing_or_cannot_be_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in str(answer(*preset(tmp_path, text)))


def test_a_preset_that_changes_nothing_is_refused_where_the_config_is_only_shown(tmp_path: Path) -> None:
    """Hydra would show the values that the preset does not change."""
    words = preset(tmp_path, "trainer: {epochs: 2}")
    with pytest.raises(ConfigError, match=NO_PACKAGE):
        cli.prepare_arguments(["train.py", "--cfg", "job", "--package", "trainer", *words])


def test_values_of_this_machine_that_nothing_reads_are_refused() -> None:
    assert NO_PACKAGE in str(answer("+local={seed:3}"))


def test_switches_without_quotes_are_words(tmp_path: Path) -> None:
    text = f"{GLOBAL}watch: {{weights: off}}\nsync_bn: {{mode: on}}\ntrainer: {{digest: off, compile: off}}\n"
    values = cli.resolve(composed(*preset(tmp_path, text)))
    check_config(values)
    assert (values["watch"]["weights"], values["sync_bn"]["mode"]) == ("off", "on")
    assert (values["trainer"]["digest"], values["trainer"]["compile"]) == ("off", False)


def test_an_option_of_an_own_group_with_the_name_of_a_section_is_added(tmp_path: Path) -> None:
    searched, chosen = preset(tmp_path, "epochs: 2", "trainer")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), **hydra_version_base()):
        assert compose("config", overrides=[searched, f"+{chosen}"]).trainer.epochs == 2
        with pytest.raises(HydraException) as refused:
            compose("config", overrides=[searched, chosen])
    said = "config.yaml chooses no option of trainer; type +trainer=own"
    assert str(as_config_error(refused.value, [searched, chosen])) == said


def test_a_config_that_does_not_build_on_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=NOT_ON_CONFIG.replace("[", r"\[")):
        check_config({"trainer": {"epochs": 1}})
    assert NOT_ON_CONFIG in unknown_key("mode", "check", [], {})
    assert NOT_ON_CONFIG in unknown_key("trainer.epochs", "3", [], {})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--config-dir={0} --config-name=nope", "nope is no config in {0}; type --config-name=bare"),
        ("--config-path={0}", "--config-path={0} has no config.yaml; type --config-dir={0} to add the folder to conf/"),
        ("--config-path={0} -cn nope", "nope is no config in {0}; type --config-name=bare"),
        ("--config-name=nope", "there is no config nope; type --config-dir=<the folder of nope.yaml>"),
    ],
)
def test_a_config_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path, flags: str, said: str) -> None:
    (tmp_path / "bare.yaml").write_text("")
    name = "nope" if "nope" in flags else "config"
    error = MissingConfigException(f"Cannot find primary config '{name}'.", name)
    assert said.format(tmp_path) in str(as_config_error(error, flags.format(tmp_path).split()))


def test_a_number_in_an_environment_variable_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "7")
    assert cli.resolve(composed("seed=${oc.env:SEED}"))["seed"] == 7
    sentence = str(answer("model=mlp", "model.width=${oc.env:SEED}"))
    assert sentence.startswith('model.width="7" is text, and must be a whole number of 1 or more; ')
    assert """; type model.width=7, or 'model.width="${oc.decode:${oc.env:NAME}}"' for""" in sentence
    assert accepted("model=mlp", 'model.width="${oc.decode:${oc.env:SEED}}"').model.width == 7
    with pytest.raises(ConfigError, match=r"^seed=2\.0 must be a whole number"):
        check_config(composed("seed=2.0"))
