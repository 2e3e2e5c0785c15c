"""From a composed config to a `RunConfig`: pydantic checks it, and an error is one sentence that ends in what to type.

No torch here, and pydantic inside functions: `--help` and ranks need neither.
"""

import copy
import json
import math
import os
import re
import shlex
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from functools import cache, reduce
from operator import getitem
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, errors

from lockstep.compat import root_of
from lockstep.config.schema import CONF, LATER, Node, RunConfig
from lockstep.errors import ConfigError
from lockstep.text import show

GROUPS = [one for one in CONF.iterdir() if one.is_dir() and one.name not in ("hydra", "local")]
OPTIONS = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in GROUPS}
UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}  # pydantic's types of errors
MISSING = {"missing", "missing_argument"}
# Their text says no more than the sentence.
TOLD = (MissingConfigException, errors.ConfigAttributeError, errors.ConfigKeyError, errors.MissingMandatoryValue)


def check(cfg: DictConfig) -> RunConfig:
    """The typed values of a composed config. Raises ConfigError for what cannot work, and what OmegaConf raises."""
    values = in_home(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    values.setdefault("logger", {})  # logger=[] leaves no section
    checked = check_values("", values, RunConfig)
    for section, name in [key.split(".") for key in LATER if "." in key]:
        node = values[section].get(name)
        if isinstance(node, dict) and "_target_" in node:
            node["_partial_"] = True
    config = cast(RunConfig, _with_nodes(checked, values))
    config.refuse_contradictions()
    return config


def _with_nodes(section: Any, values: Node) -> Any:
    """A checked section with OmegaConf's own values where there are nodes: JSON knows fewer types."""

    def own(name: str, part: Any) -> Any:
        if is_dataclass(part):
            return _with_nodes(part, values[name])
        return values[name] if isinstance(part[0] if isinstance(part, list) and part else part, dict) else part

    return replace(section, **{name: own(name, part) for name, part in vars(section).items()})


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


def check_values(section: str, values: Node, kind: Any, target: object = None) -> Any:
    """What pydantic makes of `values`, at the key `section`. kind: a dataclass, or a pydantic model.

    target: what the node `section` names. Raises ConfigError if they do not fit.
    """
    made, wrong = _validate(values, kind)
    if not wrong:
        return made
    place = _place(values, wrong[0])
    key = join(section, ".".join(place))
    wrong = [error for error in wrong if _place(values, error) == place]
    around = reduce(getitem, place[:-1], values)
    if place[-1] not in around:
        raise ConfigError(f"{key} is missing; type the command without ~{key}")
    value = around[place[-1]]
    if any(error["type"] in UNKNOWN for error in wrong):
        raise ConfigError(unknown_key(key, show(value), flatten(values, section)))

    def accepts(candidate: object) -> bool:
        changed = copy.deepcopy(values)
        reduce(getitem, place[:-1], changed)[place[-1]] = candidate
        return all(_place(changed, error)[: len(place)] != place for error in _validate(changed, kind)[1])

    said = [error["msg"] for error in wrong if error["type"] != "needs_python_object"]
    accepted = " or ".join(dict.fromkeys(text.removeprefix("Input should be ") for text in said))
    meant = [candidate for candidate in _candidates(value, wrong, default_of(key, target)) if accepts(candidate)]
    inside = [word(one, inner) for one, inner in conf_values()[""].items() if one.startswith(f"{key}.")]
    advice = word(key, meant[0]) if meant else (inside or [f"{key}=<value>"])[0]
    accepted = re.sub("be (List|Tuple) should ", "", f"should be {accepted}".replace("Field required", "longer"))
    raise ConfigError(f"{key}={show(value)} {accepted}; type {advice}")


@cache
def adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _validate(values: Node, kind: Any) -> tuple[Any, list[Any]]:
    """What pydantic makes of the values, and its errors. In JSON an object may be a dataclass, and a whole number a
    float, but the text "3" is no number."""
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_json(json.dumps(values, default=str), strict=True), []
    except ValidationError as error:
        return None, list(error.errors(include_url=False))


def _place(values: Node, error: Any) -> list[str]:
    """The key of an error, without what pydantic adds for the members of a union and for the item of a list."""
    node, place = values, []
    for name in error["loc"]:
        if isinstance(node, dict) and (name in node or error["type"] in MISSING):
            place.append(name)
            node = node.get(name, "")
    return place


def _candidates(value: Any, wrong: list[Any], default: object) -> list[Any]:
    """Values that may have been meant, the likeliest first."""
    text = show(value).lower().strip("'[]")
    words = re.findall(r"'([^']*)'", " ".join(error["msg"] for error in wrong))
    limits = [limit for error in wrong for name, limit in error.get("ctx", {}).items() if name in ("ge", "le")]
    read = [yaml.safe_load(text)] * bool(re.fullmatch(r"[\w.-]+", text))  # yes is true, and '3' a number
    read += [round(one) for one in read if isinstance(one, float) and math.isfinite(one)]
    return [*get_close_matches(text, words, 1, 0.4), *read, [value], default, *limits, *words, None, True, 1, 0.5]


def default_of(key: str, target: object = None) -> object:
    """The value of a key in conf/, of the option with this `_target_`; None if there is none, or an interpolation."""
    section = key.partition(".")[0]
    for values in conf_values().values():
        value, of = values.get(key), values.get(f"{section}._target_")
        if value is not None and target in (None, of) and not re.search(r"\$\{|\?{3}", str(value)):
            return value
    return None


# ---- Keys, options and words


@cache
def conf_values() -> dict[str, dict[str, Any]]:
    """{"model=mlp": {"model.width": 64, ...}, ...} of each option in conf/; "" are the values of config.yaml, and the
    options that it chooses."""
    base = yaml.safe_load((CONF / "config.yaml").read_text())
    chosen = {group: name for one in base.pop("defaults") if isinstance(one, dict) for group, name in one.items()}
    found = {"": flatten({key: value for key, value in base.items() if key != "hydra"}) | chosen}
    for group, names in OPTIONS.items():
        first = sorted(names, key=lambda name: name != chosen.get(group))
        texts = {name: (CONF / group / f"{name}.yaml").read_text() for name in first}
        found |= {f"{group}={name}": flatten(yaml.safe_load(text) or {}, group) for name, text in texts.items()}
    return found


def unknown_key(key: str, value: str, known: Iterable[str]) -> str:
    """The sentence for a key that this config does not have. known: its keys."""
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    if section in ("experiment", "local"):
        return f"a file below conf/{section} is not for the whole config; type # @package _global_ in its first line"
    if key.startswith(("vars.", "evaluation.metrics.")):  # these hold what one adds
        return f"{key} is a new key; type {shlex.quote(f'+{key}={value}')}"
    options = [option for option, values in conf_values().items() if option and key in values]
    if options:
        return f"{key} is a key of {' and '.join(options)}; type {options[0]} {shlex.quote(f'{key}={value}')}"
    # By its last name: of the same section before another one, of another one the first.
    keys = [one for one in (*known, *OPTIONS) if one != key and not re.search(r"\._|^hydra", one)]
    keys.sort(key=lambda one: one.partition(".")[0] == section, reverse=True)
    ends = {one.rpartition(".")[2]: one for one in reversed(keys)}
    meant = [shlex.quote(f"{ends[name]}={value}") for name in get_close_matches(last, ends, 1, 0.7)]
    own = [] if "." in key else [shlex.quote(f"+vars.{key}={value}") + " for a key of your own"]
    return f"{key} is no key of this config; type {', or '.join([*meant, *own]) or '--cfg job to see the keys'}"


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """The sentence for what Hydra or OmegaConf says of the user's input, with its text below. None for other errors.

    words: the command's.
    """
    causes = list(_causes(error))
    for own in (cause for cause in causes if isinstance(cause, ConfigError)):  # of a resolver
        return str(own)
    raised_in = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_theirs = isinstance(error, HydraException | errors.OmegaConfBaseException | yaml.YAMLError)
    if not is_theirs and raised_in[-1:] not in (["hydra"], ["omegaconf"]):
        return None
    overrides = [one for one in words if not one.startswith("-")]
    told = [(sentence, cause) for cause in causes if (sentence := _told(cause, overrides))]
    sentence, cause = told[0] if told else (_about(str(error), overrides), error)
    return sentence if isinstance(cause, TOLD) else f"{sentence}\n    " + str(cause).strip().replace("\n", "\n    ")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _told(cause: BaseException, words: list[str]) -> str | None:
    """What an error says by its type and its attributes."""
    key: Any = getattr(cause, "full_key", None)
    if isinstance(cause, yaml.YAMLError):
        mark, problem = getattr(cause, "problem_mark", None), getattr(cause, "problem", None)
        where = f"{mark.name}, line {mark.line + 1}," if mark else "a config file"
        advice = "each key once, as `key: value`, with spaces for tabs, and every bracket and quote closed"
        return f"{where} cannot be read ({problem or cause}); type {advice}"
    if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
        return _no_option(str(cause.missing_cfg_file), cause.options)
    if isinstance(cause, OverrideParseException):
        return _unreadable(str(cause.override), words)
    if isinstance(cause, errors.MissingMandatoryValue | errors.InterpolationResolutionError):
        key = key or next((one.partition("=")[0] for one in words if "${" in one), "a key")
        return f"{key} has no value; type {_with_default(key)}"
    if isinstance(cause, errors.ConfigAttributeError | errors.ConfigKeyError | errors.ConfigTypeError) and key:
        return _unknown_override(key, root_of(cause), words)
    return None


def key_of(typed: str) -> str:
    return typed.partition("=")[0].lstrip("+~").partition("@")[0]


def _with_default(key: str) -> str:
    value = default_of(key)
    return f"{key}=<value>" if value is None else word(key, value)


def _about(said: str, words: list[str]) -> str:
    """For an error that has no key: the word that it is probably about. said: its text."""
    preset = [one for one in words if key_of(one) in ("experiment", "local")]
    named = [one for one in words if key_of(one) in said] or preset or words[-1:] or ["conf/local"]
    if named == preset:
        return f"{preset[0]} chooses an option again; type override before each option in its defaults list"
    if words and OverridesParser.create().parse_override(named[0]).is_sweep_override():
        return f"{named[0]} has several values; type -m {shlex.quote(named[0])} for a sweep"
    advice = named[0][1:] if named[0].startswith("+") else f"the command without {named[0]}"
    what = "is about what is not there" if named[0].startswith("~") else "cannot be composed"
    return f"{named[0]} {what}; type {advice}"


def _no_option(file: str, options: Sequence[str] | None) -> str:
    group, _, option = file.rpartition("/")
    options = options or OPTIONS.get(group)
    folder = f"--config-dir=<the folder that holds {file}.yaml>"
    if not options:
        return f"{file} is no config; type {folder}"
    meant = [*get_close_matches(option.lower(), options, 1), default_of(group) or "<one of them>"]
    known = f"{group} has the options {', '.join(sorted(options))}"
    return f"{group}={option} is no option, and {known}; type {group}={meant[0]}, or {folder}"


def _unknown_override(key: str, cfg: Any, words: list[str]) -> str:
    """For a key that a word sets and `cfg`, which Hydra has composed so far, does not have."""
    from lockstep.config.nodes import locate, takes

    typed = next((one for one in words if f"{key_of(one)}.".startswith(f"{key}.")), key)
    if typed.startswith("~"):
        return f"{typed} is about a key that is not there; type the command without {typed}"
    key, value = key_of(typed), typed.partition("=")[2] or "<value>"
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent else None
    if OmegaConf.is_dict(node) and "_target_" in node and takes(locate(parent, node["_target_"]), name):
        return f"{key} is not in the YAML of this option, and its class takes it; type {word(f'+{key}', value)}"
    return unknown_key(key, value, flatten(OmegaConf.to_container(cfg, resolve=False)))


def _unreadable(typed: str, words: list[str]) -> str:
    """For a word that Hydra cannot parse: one near to it that it can, also with the words beside it."""
    place = words.index(typed) if typed in words else len(words)
    before, after = words[:place][-1:], words[place + 1 :]
    known = {key for values in conf_values().values() for key in values} | OPTIONS.keys()
    joined = ["".join([*before, typed]), "".join([typed, *after[:2]]), "".join([typed, *after[:1]])]
    joined += [typed.replace(":", "=", 1), f"{typed}={''.join(after[:1])}"]
    near = [one for one in joined if one.partition("=")[0] in known and re.fullmatch("[^=]+=[^=]+", one)]
    key, equals, value = typed.partition("=")
    if not equals and not near:
        return f"{key} has no value; type {_with_default(key)}" if key in known else unknown_key(key, "<value>", known)
    inner = value.strip("[](){} ,'\"")
    of_list = f"{key}=[{inner}]"
    near += [of_list] * ("," in inner) + [f"{key.strip()}={value.strip()}", f"{key}={inner}", of_list]
    for meant in near:
        with suppress(HydraException):
            OverridesParser.create().parse_override(meant)
            return f"{typed} cannot be read; type {shlex.quote(meant)}"
    quoted = value.replace('"', "")
    return f"{typed} cannot be read; type " + shlex.quote(f'{key}="{quoted}"')
