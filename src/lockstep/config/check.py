"""From a composed config to a `RunConfig`: pydantic checks it, and an error is one sentence that ends in what to type.

No torch here, and pydantic inside functions: `--help` and ranks need neither.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from lockstep.compat import hydra_composed
from lockstep.config.schema import CALLED_LATER, CONF, Node, RunConfig, build
from lockstep.errors import ConfigError

FOLDERS = ("data_dir", "run_dir", "resume")  # in which ~ is the home folder
SPELLED = {"yes": True, "on": True, "no": False, "off": False, "none": None, "nil": None, "never": None}
OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir() and folder.name not in ("hydra", "local")
}
UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}  # pydantic's types of errors
MISSING = {"missing", "missing_argument"}
SAYS_NO_MORE = (ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, MissingConfigException)


def check(cfg: DictConfig) -> RunConfig:
    """The typed values of a composed config. Raises ConfigError for what cannot work, and what OmegaConf raises."""
    values = cast(Node, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    values.setdefault("logger", {})  # logger=[] leaves no section
    values |= {key: os.path.expanduser(values[key]) for key in FOLDERS if isinstance(values.get(key), str)}
    check_values("", values, RunConfig)
    for section, name in CALLED_LATER:
        node = values[section].get(name)
        if isinstance(node, dict) and "_target_" in node:
            node["_partial_"] = True
    config = build(RunConfig, values)
    config.refuse_contradictions()
    return config


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"trainer.epochs": 5, ...}: the values of a config by their full keys."""
    if not isinstance(node, dict | DictConfig):
        return {prefix: node}
    return {key: found for name, value in node.items() for key, found in flatten(value, join(prefix, name)).items()}


def join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def show(value: object) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def word(key: str, value: object) -> str:
    """`key=value` for a shell."""
    return shlex.quote(f"{key}={show(value)}")


# ---- Values


def check_values(section: str, values: Node, kind: Any, target: object = None) -> None:
    """Raise ConfigError if `values`, at the key `section`, do not fit `kind`, a dataclass or a pydantic model.

    target: what the node `section` names.
    """
    errors = _errors(values, kind)
    if not errors:
        return
    place = _place(values, errors[0])
    errors = [error for error in errors if _place(values, error) == place]
    key, types = join(section, place), {error["type"] for error in errors}
    value = OmegaConf.select(OmegaConf.create(values), place, default=MISSING)
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if value is MISSING:
        raise ConfigError(f"{key} is missing; type {word(f'+{key}', default_of(key))}")
    if types & UNKNOWN:
        raise ConfigError(unknown_key(key, show(value), flatten(values, section)))

    def accepts(candidate: object) -> bool:
        changed = OmegaConf.create(values)
        OmegaConf.update(changed, place, candidate, merge=False)
        container = cast(Node, OmegaConf.to_container(changed))
        return all(not f"{_place(container, error)}.".startswith(f"{place}.") for error in _errors(container, kind))

    said = {error["type"]: error["msg"].removeprefix("Input should be ") for error in errors}
    said |= {"missing": "longer"} if "missing" in said else {}
    accepted = " or ".join(dict.fromkeys(text for kind, text in said.items() if kind != "needs_python_object"))
    meant = [candidate for candidate in _candidates(value, errors, default_of(key, target)) if accepts(candidate)]
    advice = word(key, meant[0]) if meant else f"{key}=<value>"
    raise ConfigError(f"{key}={show(value)} should be {accepted}; type {advice}")


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _errors(values: Node, kind: Any) -> list[Any]:
    from pydantic import ValidationError

    try:
        # JSON: an object is a dataclass, and a whole number a float, but the text "3" is no number.
        _adapter(kind).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        return list(error.errors(include_url=False))
    return []


def _place(values: Node, error: Any) -> str:
    """The key of an error, without what pydantic adds for the members of a union and for the item of a list."""
    node: Any = values
    place = []
    for name in error["loc"]:
        if isinstance(node, dict) and (name in node or error["type"] in MISSING):
            place.append(str(name))
            node = node.get(name)
    return ".".join(place)


def _candidates(value: Any, errors: list[Any], default: object) -> list[Any]:
    """Values that may have been meant, the likeliest first."""
    text = show(value).lower()
    words = re.findall(r"'([^']*)'", " ".join(error["msg"] for error in errors))
    number = re.match(r"-?\d+(\.\d+)?(e-?\d+)?", text)
    numbers = [yaml.safe_load(number[0]), round(float(number[0]))] if number else []
    inner = value[:1] if isinstance(value, list) else [] if value is None else [[value]]
    limits = [limit for error in errors for name, limit in error.get("ctx", {}).items() if name in ("ge", "le")]
    near = [*get_close_matches(text, words, 1), *(name for name in words if name in text or text in name)]
    found = [*near, SPELLED.get(text, default), *numbers, *inner, default, *limits, *words, None, True, 1, 0.5]
    return [one for one in found if not isinstance(one, dict) or "_target_" in one]


def default_of(key: str, target: object = None) -> object:
    """The value of a key in conf/, of the option with this `_target_`; None if there is none, or an interpolation."""
    section, _, rest = key.partition(".")
    files = [(CONF / "config.yaml", key), *((path, rest) for path in sorted((CONF / section).glob("*.yaml")))]
    for path, place in files:
        option = OmegaConf.create(yaml.safe_load(path.read_text()) or {})
        value = OmegaConf.select(option, place, throw_on_resolution_failure=False) if place else None
        if value is not None and "${" not in str(value) and target in (None, option.get("_target_")):
            return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return None


# ---- Keys, options and words


def unknown_key(key: str, value: str, known: Iterable[str]) -> str:
    """The sentence for a key that this config does not have."""
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    if section in ("experiment", "local"):
        return f"a file below conf/{section} is not for the whole config; type # @package _global_ in its first line"
    keys = [one for one in known if one != key and not one.rpartition(".")[2].startswith("_")]
    keys = keys if "." in key else [*OPTIONS, *keys]
    ends = {one: one.rpartition(".")[2] for one in keys}
    near = get_close_matches(last, ends.values(), 1, 0.75)
    alike = [one for one in keys if ends[one] == last] or [one for one in keys if near and ends[one] == near[0]]
    alike.sort(key=lambda one: (one.partition(".")[0] != section, len(one)))
    meant = [shlex.quote(f"{one}={value}") for one in [*alike, *get_close_matches(key, keys, 1, 0.85)][:1]]
    name = key.removeprefix("vars.")
    own = [] if "." in name else [shlex.quote(f"+vars.{name}={value}") + " for a key of your own"]
    return f"{key} is no key of this config; type {', or '.join([*meant, *own]) or '--cfg job to see the keys'}"


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """The sentence for what Hydra or OmegaConf says of the user's input, with its text below. None for other errors.

    words: the command's.
    """
    causes = list(_causes(error))
    if not any(isinstance(cause, HydraException | OmegaConfBaseException | yaml.YAMLError) for cause in causes):
        return None
    overrides = [one for one in words if not one.startswith("-")]
    for cause in causes:
        sentence = str(cause) if isinstance(cause, ConfigError) else _told(cause, overrides)
        if sentence is not None:
            break
    else:
        cause, sentence = error, "the config cannot be composed; type --info to see how"
        for one in overrides:
            if composed([other for other in overrides if other != one]) is not None:
                is_sweep = OverridesParser.create().parse_override(one).is_sweep_override()
                advice = f"-m {shlex.quote(one)} for a sweep" if is_sweep else "--cfg job to see the keys"
                sentence = f"{one} cannot be used here; type {advice}"
    more = "" if isinstance(cause, (ConfigError, *SAYS_NO_MORE)) else str(cause).strip().replace("\n", "\n    ")
    return f"{sentence}\n    {more}" if more else sentence


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _told(cause: BaseException, words: list[str]) -> str | None:
    """What an error says by its type and its attributes."""
    key = getattr(cause, "full_key", None)
    if isinstance(cause, yaml.YAMLError):
        mark = getattr(cause, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}," if mark else "a config file"
        return f"{where} is no YAML; type one `key: value` a line, with spaces, and every bracket and quote closed"
    if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
        group, _, option = str(cause.missing_cfg_file).rpartition("/")
        options = sorted(cause.options or OPTIONS.get(group, []))
        meant = (get_close_matches(option, options, 1) or ["<one of them>"])[0]
        other = f"--config-dir=<the folder that holds {cause.missing_cfg_file}.yaml>"
        known = f"{group} has the options {', '.join(options)}; type {group}={meant}, or {other}"
        return f"{cause.missing_cfg_file} is no config: {known if options else f'type {other}'}"
    if isinstance(cause, OverrideParseException):
        return _unreadable(str(cause.override), words)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no value; type {key}=<value>"
    if isinstance(cause, InterpolationResolutionError):
        key = key or next((one.partition("=")[0] for one in words if "${" in one), "a key")
        return f"{key} has no usable value; type {key}=<value>"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError | ConfigTypeError) and key:
        return _unknown_override(key, words)
    return None


def _unknown_override(key: str, words: list[str]) -> str:
    from lockstep.config.nodes import locate, parameters_of

    typed = next((one for one in words if f"{one.lstrip('+~').partition('=')[0]}.".startswith(f"{key}.")), key)
    key, _, value = typed.lstrip("+~").partition("=")
    cfg = composed([one for one in words if one.lstrip("+").partition("=")[0] in OPTIONS])
    if typed.startswith("~") or cfg is None:
        return f"{typed} is about a key that is not there; type --cfg job to see the keys"
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent else None
    if OmegaConf.is_dict(node) and "_target_" in node:
        parameters = parameters_of(locate(parent, node["_target_"]))
        if parameters is None or name in parameters:
            return f"{key} is not in the YAML of this option, and its class takes it; type {word(f'+{key}', value)}"
    return unknown_key(key, value or "<value>", flatten(OmegaConf.to_container(cfg, resolve=False)))


def _unreadable(typed: str, words: list[str]) -> str:
    """For a word that Hydra cannot parse: a word near to it that it can."""
    key, equals, value = typed.partition("=")
    if not equals:
        key, colon, value = typed.partition(":")
        cfg = composed([one for one in words if one.partition("=")[0] in OPTIONS])
        known = flatten(OmegaConf.to_container(cfg, resolve=False)) if cfg is not None else {}
        after = [one for one in words[words.index(typed) + 1 :] if "=" not in one] if typed in words else []
        if key not in known and key not in OPTIONS:
            return unknown_key(key, value or "<value>", known)
        value = value if colon else after[0] if after else show(default_of(key))
        return f"{typed} has no =; type {key}={value}"
    inner = value.strip("[](){} ,'\"")
    for meant in (f"{key.strip()}={value.strip()}", f"{key}=[{inner}]", f"{key}={inner}", f'{key}="{inner}"'):
        with suppress(HydraException):
            OverridesParser.create().parse_override(meant)
            return f"{typed} cannot be read; type {shlex.quote(meant)}"
    return f"{typed} cannot be read; type {key}=<value>, with every bracket and quote closed"


def composed(words: Sequence[str]) -> DictConfig | None:
    """The config of these words, None if Hydra cannot compose them."""
    try:
        with hydra_composed(["run_dir=.", *words]) as cfg:
            return cast(DictConfig, cfg)
    except Exception:
        return None
