"""From a composed config to a `RunConfig`, and errors as one sentence each. pydantic is imported where it checks."""

import json
import os
import re
import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, errors

from lockstep.config.schema import CONF, RunConfig
from lockstep.errors import ConfigError
from lockstep.text import first_line, show

OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir() and folder.name not in ("hydra", "local")
}


def check(cfg: DictConfig) -> RunConfig:
    """The typed values of a composed config. Raises ConfigError for what cannot work, and what OmegaConf raises."""
    values = in_home(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    values.setdefault("logger", {})  # logger=[] leaves no section
    config: RunConfig = check_value(RunConfig, values)
    for node in (config.scheduler.get("schedule"), config.optimizer.get("others"), config.loader.collate_fn):
        if isinstance(node, dict):
            node["_partial_"] = True  # the arguments come later
    config.refuse_contradictions()
    return config


def in_home(value: Any) -> Any:
    """A value with the home folder for the ~ of its paths, which no shell has seen where they stand in YAML."""
    if isinstance(value, dict):
        return {name: in_home(item) for name, item in value.items()}
    if isinstance(value, list):
        return [in_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"trainer.epochs": 5, ...}: the values of a config by their full keys."""
    if not isinstance(node, dict | DictConfig):
        return {prefix: node}
    return {key: found for name, value in node.items() for key, found in flatten(value, join(prefix, name)).items()}


def join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def word(key: str, value: object) -> str:
    """`key=value` for a shell."""
    return shlex.quote(f"{key}={show(value)}")


# ---- Values


def check_value(kind: Any, value: Any, key: str = "") -> Any:
    """The value of `key` as its type has it, a section as its dataclass. Raises ConfigError if it does not fit."""
    if is_dataclass(kind):
        return _section(kind, value, key)
    made, wrong = _validate(value, kind)
    if not wrong:
        return made if isinstance(made, float) else value  # JSON knows fewer types
    said = [error["msg"].removeprefix("Input should be ") for error in wrong if error["type"] != "needs_python_object"]
    accepted = " or ".join(dict.fromkeys(said)).replace("Field required", "longer")
    options = re.findall("'([^']*)'", accepted)
    near = get_close_matches(show(value).lower().strip("'[]"), options, 1, 0.4)
    meant = [word(key, one) for one in (*near, [value], None, *options) if not _validate(one, kind)[1]]
    raise ConfigError(f"{key}={show(value)} should be {accepted}; type {[*meant, f'{key}=<value>'][0]}")


def _section(kind: Any, values: Any, section: str) -> Any:
    if not isinstance(values, dict):
        what = f"{section} is a section with keys of its own"
        raise ConfigError(f"{what}; type the command without {word(section, values)}")
    types = get_type_hints(kind, include_extras=True)
    for name in [*values, *types]:
        key = join(section, name)
        if name not in types:
            raise ConfigError(unknown_key(key, show(values[name]), flatten(values, section)))
        if name not in values:
            raise ConfigError(f"{key} is missing; type the command without ~{key}")
    return kind(**{name: check_value(of, values[name], join(section, name)) for name, of in types.items()})


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))


def _validate(value: Any, kind: Any) -> tuple[Any, list[Any]]:
    """What pydantic makes of a value, and its errors. In JSON a whole number may be a float, but the text "3" is no
    number."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(json.dumps(value, default=str), strict=True), []
    except ValidationError as error:
        return None, list(error.errors(include_url=False))


# ---- What Hydra and OmegaConf refuse

THEIRS = (HydraException, errors.OmegaConfBaseException, yaml.YAMLError)


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """The sentence for what Hydra or OmegaConf says of the user's input, with its text below where that says more.

    None for other errors. words: the command's.
    """
    raised_in = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, THEIRS) and raised_in[-1:] not in (["hydra"], ["omegaconf"]):
        return None
    typed = [one for one in words if not one.startswith("-")]
    said, causes, unread = str(error).strip(), [error], list[str]()
    while cause := causes[0].__cause__ or causes[0].__context__:
        causes.insert(0, cause)
    for cause in causes:
        key: Any = getattr(cause, "full_key", None)
        if isinstance(cause, ConfigError):  # of a resolver
            return str(cause)
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            return _no_option(str(cause.missing_cfg_file), sorted(cause.options or ()))
        if isinstance(cause, OverrideParseException):
            unread = [str(cause.override)]
        if isinstance(cause, errors.MissingMandatoryValue | errors.InterpolationResolutionError) and key:
            return f"{key} has no value ({first_line(cause)}); type {key}=<value>"
        if isinstance(cause, errors.ConfigAttributeError | errors.ConfigKeyError):
            for one in (one for one in typed if f"{key_of(one)}.".startswith(f"{key}.")):
                beside = flatten(OmegaConf.to_container(cause.parent_node, resolve=False), key.rpartition(".")[0])
                return unknown_key(key_of(one), one.partition("=")[2], beside)
    # Else the text may name a word, or it is about a preset, or the last word.
    presets = [one for one in typed if key_of(one) == "experiment"]
    named = [*unread, *(one for one in typed if key_of(one) in said), *presets, *typed[-1:], "conf/local"][0]
    below = said.replace("\n", "\n    ")
    return f"{named} cannot be composed; type the command without {shlex.quote(named)}\n    {below}"


def _no_option(name: str, options: list[str]) -> str:
    """The sentence for a config that is not there, such as model/nlp. options: those beside it."""
    group, _, option = name.rpartition("/")
    folder = f"--config-dir=<the folder that holds {name}.yaml>"
    if not (options := options or OPTIONS.get(group, [])):
        return f"{name} is no config; type {folder}"
    meant = [*get_close_matches(option.lower(), options, 1), options[0]][0]
    known = f"{group} has the options {', '.join(options)}"
    return f"{group}={option} is no option, and {known}; type {group}={meant}, or {folder}"


def unknown_key(key: str, value: str, known: Mapping[str, Any]) -> str:
    """The sentence for a key that is not in this config. known: the values beside it, by their full keys."""
    from lockstep.config.nodes import locate, takes

    section, (parent, _, name) = key.partition(".")[0], key.rpartition(".")
    target = known.get(f"{parent}._target_")
    if section in ("experiment", "local"):
        return f"a file below conf/{section} is not for the whole config; type # @package _global_ in its first line"
    if parent in ("vars", "evaluation.metrics") or (target and takes(locate(parent, target), name)):
        return f"{key} is a new key; type {word(f'+{key}', value)}"
    keys = [one for one in [*OPTIONS, *known] if not re.search(r"\._|^(hydra|experiment)", one) and one != key]
    ends = {one.rpartition(".")[2]: one for one in reversed(keys)}
    meant = [word(ends[close], value) for close in get_close_matches(name, ends, 1, 0.7)]
    own = [] if parent else [f"{word(f'+vars.{key}', value)} for a key of your own"]
    return f"{key} is no key of this config; type {', or '.join([*meant, *own]) or '--cfg job to see the keys'}"


def key_of(typed: str) -> str:
    """The key of an override, a word of the command."""
    return re.split("[=@:]", typed.lstrip("+~"))[0].strip()
