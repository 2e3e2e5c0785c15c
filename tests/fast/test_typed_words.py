"""Typed words that Hydra cannot read, and typed words that it reads and nothing else does."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.config.check import check_unread_overrides, notice_of_unread_overrides, with_whole_folders
from lockstep.errors import ConfigError, path_word
from support.configs import composed
from support.refusals import answer

OF_OTHER_TYPES = ["1_5", "1e3", "null", "True", ".5"]  # without quotes
ODD_VALUES = [
    *OF_OTHER_TYPES,
    "a=b",
    "a'b",
    'a"b',
    "a\\b",
    "a\\",
    'a\\"b',
    "a\\'",
    "~",
    "日本",
    "${x:${y:Z}}",
    " x ",
    "a'b\"c\\'d\\\\",
]


@pytest.mark.parametrize("value", ODD_VALUES)
def test_a_value_in_quotes_passes_the_shell_and_hydra_as_it_is(value: str) -> None:
    (word,) = shlex.split(path_word("key", value))
    assert OverridesParser.create().parse_override(word).value() == value


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("resume=a/b.lr=0.1", """(mismatched input '='); type 'resume="a/b.lr=0.1"'"""),
        ("resume=日本", """resume=日本 cannot be read (日 must be in quotes); type 'resume="日本"'"""),
        ("data_dir=~/data", """data_dir=~/data cannot be read (~ must be in quotes); type data_dir=/home/me/data"""),
        ("seed=${oc.decode:${oc.env:S}}", """'}'); type 'seed="${oc.decode:${oc.env:S}}"'"""),
        ("trainer.epochs==3", "(extraneous input '='); type trainer.epochs=3"),
        ("resume=runs(1)/a", "); type 'resume=\"runs(1)/a\"'"),
        ("model={_target_:a.B", "); type model=<value>, with every bracket and quote closed"),
    ],
)
def test_a_word_that_cannot_be_read_is_shown_as_it_can(monkeypatch: Any, typed: str, said: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert str(answer(typed)).endswith(said)


def typed_config(*words: str, chdir: bool = False) -> tuple[Any, Any, Any]:
    """(config, its values, Hydra's config) of these words."""
    cfg = composed(*words)
    node = {"overrides": {"task": list(words)}, "job": {"chdir": chdir}, "runtime": {"cwd": "/here"}}
    return cfg, cli.resolve(cfg), OmegaConf.create(node)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("+epochs=3", "epochs is no key of this config; type trainer.epochs=3"),
        ("+lr=3", "lr is no key of this config; type optimizer.lr=3"),
        ("++trainr.epochs=3", "trainr.epochs is no key of this config; type trainer.epochs=3"),
        ("+modle=mlp", "modle is no key of this config; type model=mlp"),
    ],
)
def test_a_plus_does_not_bring_in_a_misspelled_key(typed: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_unread_overrides(*typed_config(typed))
    assert str(refused.value) == said


def test_keys_of_the_users_own_are_accepted_and_named_if_nothing_reads_them() -> None:
    labels = ["+foo.bar=1", "+tag=a", "+name=b"]
    cfg, values, hydra_cfg = typed_config(*labels, "+width=8", "model=mlp", "model.width=${width}")
    check_unread_overrides(cfg, values, hydra_cfg)
    assert notice_of_unread_overrides(cfg, hydra_cfg) == "nothing in this run reads foo.bar, tag or name"
    hydra_cfg.run = {"dir": "outputs/${tag}-${name}-${oc.select:foo.bar,0}"}
    assert notice_of_unread_overrides(cfg, hydra_cfg) == ""


def test_a_relative_folder_is_that_of_the_command_where_hydra_changes_the_folder() -> None:
    cfg, _, hydra_cfg = typed_config("data_dir=data", "run_dir=/runs", chdir=True)
    whole = with_whole_folders(cfg, hydra_cfg)
    assert (whole.data_dir, whole.run_dir, whole.resume) == ("/here/data", "/runs", None)
    cfg, _, hydra_cfg = typed_config("data_dir=data", "resume='~/runs'")
    assert with_whole_folders(cfg, hydra_cfg).resume == str(Path("~/runs").expanduser())
    assert with_whole_folders(cfg, hydra_cfg).data_dir == "data"
