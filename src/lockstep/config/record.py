"""What a run folder keeps of its config. Made once, before ranks start."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from lockstep.config.check import flatten, key_of
from lockstep.config.schema import RunConfig

RECORD = ".hydra"


@dataclass(frozen=True)
class ConfigRecord:
    """Plain values, which ranks get beside their config. Files and messages have `shown` in place of `flat`: a value
    that an environment variable decides is its text, such as ${oc.env:KEY}.
    options: {config group: the option, or the class if another one was typed}. command: of the same run, in a shell;
    flags: its words that name config folders. files: {name: text} of .hydra, for rank 0 when it holds the run
    folder."""

    flat: Mapping[str, Any]
    shown: Mapping[str, Any]
    options: Mapping[str, str | None]
    overrides: Sequence[str]
    command: str
    flags: Sequence[str]
    files: Mapping[str, str]

    def completed(self, config: RunConfig) -> "ConfigRecord":
        """With the values of `config` for what was null or balanced, which the data have given since."""
        now = flatten({key: getattr(config, key) for key in ("dataset", "model", "task")})
        told = {key: now[key] for key, value in self.flat.items() if value in (None, "balanced") and key in now}
        return replace(self, flat={**self.flat, **told}, shown={**self.shown, **told})


def record_config(cfg: DictConfig, config: RunConfig, hydra_cfg: HydraConf, argv: Sequence[str]) -> ConfigRecord:
    """The record of `cfg`, which has its interpolations, and of `config`, which was made of it. argv: the command."""
    flat = flatten(OmegaConf.to_container(cfg, resolve=True)) | {"run_dir": config.run_dir}
    shown = without_secrets(flat, flatten(OmegaConf.to_container(cfg, resolve=False)))
    overrides = typed_overrides(hydra_cfg)
    options = {str(group): name for group, name in hydra_cfg.runtime.choices.items()}
    for key, equals, target in (one.lstrip("+").partition("._target_=") for one in overrides):
        if equals and key in options:
            options[key] = target
    files = {"config.yaml": OmegaConf.to_yaml(cfg), "overrides.yaml": OmegaConf.to_yaml(overrides)}
    return ConfigRecord(flat, shown, options, overrides, shlex.join(["python", *argv]), config_flags(argv[1:]), files)


def without_secrets(flat: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """`flat` with the text of a value that an environment variable decides. written: all texts."""
    secret = set[str]()
    for _ in range(9):  # a key may name a key that names one
        links = ["oc.env", *(f"${{{key}}}" for key in secret)]
        secret = {key for key, text in written.items() if any(link in str(text) for link in links)}
    texts = {key: [written[one] for one in secret if f"{key}.".startswith(f"{one}.")] for key in flat}
    return {key: [*texts[key], value][0] for key, value in flat.items()}


def typed_overrides(hydra_cfg: HydraConf) -> list[str]:
    """With ${oc.env:KEY} as it is: to read an item of Hydra's list would resolve it."""
    return [str(one) for one in cast(list[str], OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False))]


def config_flags(words: Sequence[str]) -> list[str]:
    """Those of the words of `cli.words_of` that say which folders a config is composed from: they are no overrides."""
    return [one for one in words if one.startswith(("--config-", "hydra.searchpath="))]


def sets(word: str, names: Sequence[str]) -> bool:
    """Whether an override sets one of `names`, or what is below it."""
    return any(f"{key_of(word)}.".replace("/", ".").startswith(f"{name}.") for name in names)
