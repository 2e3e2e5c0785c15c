"""A run's config as it is compared and written. Made once, before ranks start: OmegaConf reads all keys in 5 ms."""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, ListConfig, OmegaConf

from lockstep.config.check import LEFT_OUT, as_written, notice_of_unread_overrides, values_as_written
from lockstep.config.schema import CONF, as_dict, flatten


@dataclass(frozen=True)
class ConfigRecord:
    """Plain values, which ranks get beside their config.

    flat: {key: value}, resolved.
    shown: the same, as files and messages may have it: without the values that environment variables decide.
    hydra_files: {name: text} of what Hydra writes to a run's `.hydra`. Rank 0 writes it itself, once it holds the run
        folder's lock: a refused command must not overwrite the record of a running one.
    options: {config group: the option chosen, or the class where another one than the option's is chosen}.
    run_json: what run.json says of the command.
    notice: what is logged when the run begins.
    """

    flat: Mapping[str, Any]
    shown: Mapping[str, Any]
    hydra_files: Mapping[str, str]
    options: Mapping[str, str | None]
    run_json: Mapping[str, Any]
    notice: str = ""

    def completed(self, cfg: DictConfig) -> "ConfigRecord":
        """With the values of `cfg` for what was null or balanced, which the data have given since, and without the
        arguments of an option that the chosen class does not take.
        """
        now = flatten(as_dict(cfg))
        left = [key for key, value in self.flat.items() if value in (None, "balanced") and key in now]
        found = plain_values({key: now[key] for key in left})

        def complete(values: Mapping[str, Any]) -> dict[str, Any]:
            return {key: found.get(key, value) for key, value in values.items() if key in now}

        run_json = {**self.run_json, "config": complete(self.run_json["config"])}
        return replace(self, flat=complete(self.flat), shown=complete(self.shown), run_json=run_json)


def record_config(
    composed: DictConfig, cfg: DictConfig, hydra_cfg: HydraConf, argv: Sequence[str], flags: Sequence[str]
) -> ConfigRecord:
    """What is recorded of a config.

    composed: with its interpolations, such as ${oc.env:KEY}.
    cfg: `composed`, checked and resolved.
    argv: the command.
    flags: its words that say which folders of configs it is composed from.
    """
    flat = plain_values(flatten(as_dict(cfg)))
    shown = as_written(flat, values_as_written(composed))
    # ${oc.env:KEY} as it is: to read an item of Hydra's list would resolve it.
    overrides = [str(word) for word in cast(list[str], OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False))]
    hydra_files = {
        "config.yaml": OmegaConf.to_yaml(composed),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra_cfg})),
        "overrides.yaml": OmegaConf.to_yaml(hydra_cfg.overrides.task),
    }
    options = {
        str(group): _option_or_class(str(group), name, flat) for group, name in hydra_cfg.runtime.choices.items()
    }
    script, *words = argv
    if not script.endswith("train.py"):  # another program than the shell has started this: what gives the same run
        script, words = "src/train.py", [*overrides, *flags]
    config, folder = dict(shown), shown["run_dir"]
    for key, value in shown.items():  # loggers name a place in the run folder; equal configs shall have the same hash
        if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
            config[key] = value.replace(folder, "${run_dir}", 1)
    hidden = [key for key, value in flat.items() if shown[key] != value and key not in LEFT_OUT]
    run_json = {
        "values": {key: _short_digest(flat[key]) for key in hidden},
        "command": shlex.join(["python", script, *words]),
        "flags": list(flags),
        "overrides": overrides,
        "cwd": os.getcwd(),
        "seed": shown["seed"],
        "options": {group: option for group, option in options.items() if not group.startswith("hydra/")},
        "config": config,
    }
    return ConfigRecord(flat, shown, hydra_files, options, run_json, notice_of_unread_overrides(composed, hydra_cfg))


def _short_digest(value: object) -> str:
    """16 bits of a hash: two values are told apart, and nobody can find a secret again by trying words."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:4]


def _option_or_class(group: str, option: str | None, flat: Mapping[str, Any]) -> str | None:
    """The option of a group; the class if another one than the option's is chosen, as by model._target_=my.Net."""
    target = flat.get(f"{group}._target_")
    path = CONF / group / f"{option}.yaml"
    own = re.search(r"^_target_: (\S+)", path.read_text(), re.MULTILINE) if target and path.is_file() else None
    return str(target) if own is not None and own[1] != target else option


def plain_values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`flat` with lists, dicts and plain values only, as a snapshot can store it. Other values become text."""
    return {key: _plain_value(value) for key, value in flat.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, list | tuple | ListConfig):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict):
        return plain_values(value)
    return value if type(value) in (bool, int, float, str, type(None)) else str(value)
