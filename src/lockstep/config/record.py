"""A run's config as it is compared and written. Made once, before ranks start: OmegaConf reads all keys in 5 ms."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, ListConfig, OmegaConf

from lockstep.config.check import as_written, notice_of_unread_overrides, values_as_written
from lockstep.config.schema import as_dict, flatten


@dataclass(frozen=True)
class ConfigRecord:
    """Plain values, which ranks get beside their config.

    flat: {key: value}, resolved.
    shown: the same, as files and messages may have it: without the values that environment variables decide.
    hydra_files: {name: text} of what Hydra writes to a run's `.hydra`. Rank 0 writes it itself, once it holds the run
        folder's lock: a refused command must not overwrite the record of a running one.
    options: {config group: the option chosen}.
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
        """With the values of `cfg` for keys that were null, which the data have given since."""
        unknown = [key for key, value in self.flat.items() if value is None]
        values = {key: OmegaConf.select(cfg, key) for key in unknown}
        found = plain_values({key: value for key, value in values.items() if value is not None})
        run_json = {**self.run_json, "config": {**self.run_json["config"], **found}}
        return replace(self, flat={**self.flat, **found}, shown={**self.shown, **found}, run_json=run_json)


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
    run_json = {
        "command": _command(argv, overrides, flags),
        "flags": list(flags),
        "overrides": overrides,
        "cwd": os.getcwd(),
        "seed": shown["seed"],
        "config": {key: _without_folder(value, shown["run_dir"]) for key, value in shown.items()},
    }
    options = cast(dict[str, str | None], dict(hydra_cfg.runtime.choices))
    return ConfigRecord(flat, shown, hydra_files, options, run_json, notice_of_unread_overrides(composed, hydra_cfg))


def plain_values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`flat` with lists, dicts and plain values only, as a snapshot can store it. Other values become text."""
    return {key: _plain_value(value) for key, value in flat.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, list | tuple | ListConfig):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict):
        return plain_values(value)
    return value if type(value) in (bool, int, float, str, type(None)) else str(value)


def _command(argv: Sequence[str], overrides: Sequence[str], flags: Sequence[str]) -> str:
    """What was typed, or what gives the same run if this process was started by another program than the shell."""
    script, *words = argv
    if not script.endswith("train.py"):
        script, words = "src/train.py", [*overrides, *flags]
    return shlex.join(["python", script, *words])


def _without_folder(value: Any, folder: str) -> Any:
    """Loggers have keys that name a place in the run folder. Two runs with the same config shall have the same hash."""
    is_inside = isinstance(value, str) and (value == folder or value.startswith(f"{folder}/"))
    return value.replace(folder, "${run_dir}", 1) if is_inside else value
