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
    """Plain values, which ranks get beside their config.

    flat: {key: value}, resolved. shown: the same for files and messages: a value that an environment variable decides
        is its text, such as ${oc.env:KEY}. options: {config group: the option, or the class if another one was typed}.
    overrides: those typed. command: of the same run, in a shell; flags: its words that name config folders.
    files: {name: text} of the folder .hydra, written by rank 0 alone, when it holds the run folder's lock.
    """

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

        def complete(values: Mapping[str, Any]) -> dict[str, Any]:
            return {key: now.get(key, value) if value in (None, "balanced") else value for key, value in values.items()}

        return replace(self, flat=complete(self.flat), shown=complete(self.shown))


def record_config(cfg: DictConfig, config: RunConfig, hydra_cfg: HydraConf, argv: Sequence[str]) -> ConfigRecord:
    """The record of `cfg`, which has its interpolations, and of `config`, which was made of it. argv: the command."""
    flat = flatten(OmegaConf.to_container(cfg, resolve=True)) | {"run_dir": config.run_dir}
    written = flatten(OmegaConf.to_container(cfg, resolve=False))
    overrides = typed_overrides(hydra_cfg)
    options = {str(group): name for group, name in hydra_cfg.runtime.choices.items()}
    for key, equals, target in (one.lstrip("+").partition("._target_=") for one in overrides):
        if equals and key in options:
            options[key] = target
    flags, command = config_flags(argv[1:]), shlex.join(["python", *argv])
    files = {"config.yaml": OmegaConf.to_yaml(cfg), "overrides.yaml": OmegaConf.to_yaml(overrides)}
    return ConfigRecord(flat, as_shown(flat, written), options, overrides, command, flags, files)


def typed_overrides(hydra_cfg: HydraConf) -> list[str]:
    """With ${oc.env:KEY} as it is: to read an item of Hydra's list would resolve it."""
    return [str(one) for one in cast(list[str], OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False))]


def as_shown(flat: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """`flat` without the values that an environment variable decides, directly or by another key. written: its text."""

    secret = set[str]()
    for _ in range(9):  # a key may name a key that names one
        links = ["oc.env", *(f"${{{key}}}" for key in secret)]
        secret = {key for key, text in written.items() if any(link in str(text) for link in links)}
    return {
        key: next((written[one] for one in secret if f"{key}.".startswith(f"{one}.")), value)
        for key, value in flat.items()
    }


def config_flags(words: Sequence[str]) -> list[str]:
    """Those of the words that say which folders of configs a config is composed from: they are no overrides."""
    names = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path"}
    pairs = zip((one.partition("=") for one in words), [*words, ""][1:], strict=True)
    named = [(names.get(name, name), value if equals else after) for (name, equals, value), after in pairs]
    found = [f"{name}={value}" for name, value in named if name in names.values()]
    return found + [one for one in words if one.startswith("hydra.searchpath=")]


def sets(word: str, names: Sequence[str]) -> bool:
    """Whether an override sets one of `names`, or what is below it."""
    return any(f"{key_of(word)}.".replace("/", ".").startswith(f"{name}.") for name in names)
