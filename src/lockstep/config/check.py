"""From a composed config to a `RunConfig`: pydantic checks it, and an error is one sentence that ends in what to type.

No torch here, and pydantic inside functions: `--help` and ranks need neither.
"""

import json
import os
import re
import shlex
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, errors

from lockstep.compat import root_of
from lockstep.config.schema import CONF, LATER, Node, RunConfig, build
from lockstep.errors import ConfigError

SPELLED: dict[str, bool | None] = dict.fromkeys(("yes", "on", "true"), True)
SPELLED |= dict.fromkeys(("no", "off", "false"), False) | dict.fromkeys(("none", "never"), None)
GROUPS = [one for one in CONF.iterdir() if one.is_dir() and one.name not in ("hydra", "local")]
OPTIONS = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in GROUPS}
UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}  # pydantic's types of errors
MISSING = {"missing", "missing_argument"}
LENGTHS = {"missing": "longer", "too_short": "longer", "too_long": "shorter"}  # of a list
# Their text says no more than the sentence.
TOLD = (MissingConfigException, errors.ConfigAttributeError, errors.ConfigKeyError, errors.MissingMandatoryValue)


def check(cfg: DictConfig) -> RunConfig:
    """The typed values of a composed config. Raises ConfigError for what cannot work, and what OmegaConf raises."""
    values = cast(Node, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    values.setdefault("logger", {})  # logger=[] leaves no section
    values = in_home(values)
    check_values("", values, RunConfig)
    for section, name in [key.split(".") for key in LATER if "." in key]:
        node = values[section].get(name)
        if isinstance(node, dict) and "_target_" in node:
            node["_partial_"] = True
    config = build(RunConfig, values)
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
    wrong = _errors(values, kind)
    if not wrong:
        return
    place = _place(values, wrong[0])
    wrong = [error for error in wrong if _place(values, error) == place]
    key, types = join(section, place), {error["type"] for error in wrong}
    value = OmegaConf.select(OmegaConf.create(values), place, default=MISSING)
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if value is MISSING:
        raise ConfigError(f"{key} is missing; type the command without ~{key}")
    if types & UNKNOWN:
        raise ConfigError(unknown_key(key, show(value), flatten(values, section)))

    def accepts(candidate: object) -> bool:
        changed = OmegaConf.create(values)
        OmegaConf.update(changed, place, candidate, merge=False)
        container = cast(Node, OmegaConf.to_container(changed))
        return all(not f"{_place(container, error)}.".startswith(f"{place}.") for error in _errors(container, kind))

    said = {error["type"]: error["msg"].removeprefix("Input should be ") for error in wrong}
    said |= {kind: text for kind, text in LENGTHS.items() if kind in said}
    accepted = " or ".join(dict.fromkeys(text for kind, text in said.items() if kind != "needs_python_object"))
    meant = [candidate for candidate in _candidates(value, wrong, default_of(key, target)) if accepts(candidate)]
    inside = [word(one, inner) for one, inner in conf_values()[""].items() if one.startswith(f"{key}.")]
    advice = word(key, meant[0]) if meant else (inside or [f"{key}=<value>"])[0]
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


def _candidates(value: Any, wrong: list[Any], default: object) -> list[Any]:
    """Values that may have been meant, the likeliest first."""
    text = show(value).lower()
    words = re.findall(r"'([^']*)'", " ".join(error["msg"] for error in wrong))
    number = re.fullmatch(r"(-?\d+(\.\d+)?(e-?\d+)?)[a-z]*", text)
    numbers = [yaml.safe_load(number[1]), round(float(number[1]))] if number else []
    inner = value[:1] if isinstance(value, list) else [] if value is None else [[value]]
    limits = [limit for error in wrong for name, limit in error.get("ctx", {}).items() if name in ("ge", "le")]
    near = [*get_close_matches(text, words, 1), *(name for name in words if name in text or text in name)]
    near += [SPELLED[text]] if text in SPELLED else []
    found = [*near, *numbers, *inner, default, *limits, *words, None, True, 1, 0.5]
    return [one for one in found if not isinstance(one, dict) or "_target_" in one]


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
        texts = {name: (CONF / group / f"{name}.yaml").read_text() for name in names}
        found |= {f"{group}={name}": flatten(yaml.safe_load(text) or {}, group) for name, text in texts.items()}
    return found


def unknown_key(key: str, value: str, known: Iterable[str]) -> str:
    """The sentence for a key that this config does not have."""
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    if section in ("experiment", "local"):
        return f"a file below conf/{section} is not for the whole config; type # @package _global_ in its first line"
    options = [option for option, values in conf_values().items() if option and key in values]
    if options:
        return f"{key} is a key of {' and '.join(options)}; type {options[0]} {shlex.quote(f'{key}={value}')}"
    keys = [one for one in known if one != key and not one.rpartition(".")[2].startswith("_")]
    keys = keys if "." in key else [*OPTIONS, *keys]
    ends = {one: one.rpartition(".")[2] for one in keys}
    groups = [group for group, names in OPTIONS.items() if value in names]
    near = get_close_matches(key, groups, 1) or get_close_matches(last, ends.values(), 1, 0.75)
    alike = [one for one in keys if ends[one] == last] or [one for one in keys if near and ends[one] == near[0]]
    alike.sort(key=lambda one: (one.partition(".")[0] != section, len(one)))
    meant = [shlex.quote(f"{one}={value}") for one in [*alike, *get_close_matches(key, keys, 1, 0.65)][:1]]
    name = key.removeprefix("vars.")
    own = [] if "." in name else [shlex.quote(f"+vars.{name}={value}") + " for a key of your own"]
    return f"{key} is no key of this config; type {', or '.join([*meant, *own]) or '--cfg job to see the keys'}"


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """The sentence for what Hydra or OmegaConf says of the user's input, with its text below. None for other errors.

    words: the command's.
    """
    causes = sorted(_causes(error), key=lambda cause: not isinstance(cause, ConfigError))  # a resolver may raise one
    raised_in = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    known = any(isinstance(cause, HydraException | errors.OmegaConfBaseException | yaml.YAMLError) for cause in causes)
    if not known and raised_in[-1:] not in (["hydra"], ["omegaconf"]):
        return None
    overrides = [one for one in words if not one.startswith("-")]
    for cause in causes:
        sentence = str(cause) if isinstance(cause, ConfigError) else _told(cause, overrides)
        if sentence is not None:
            break
    else:
        cause, sentence = error, _about(str(error), overrides)
    more = "" if isinstance(cause, (ConfigError, *TOLD)) else str(cause).strip().replace("\n", "\n    ")
    return f"{sentence}\n    {more}" if more else sentence


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
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
        group, _, option = str(cause.missing_cfg_file).rpartition("/")
        return _no_option(group, option, cause.options or OPTIONS.get(group, []))
    if isinstance(cause, OverrideParseException):
        return _unreadable(str(cause.override), words)
    if isinstance(cause, errors.MissingMandatoryValue):
        return f"{key} has no value; type {_with_default(key)}"
    if isinstance(cause, errors.InterpolationResolutionError):
        key = key or next((one.partition("=")[0] for one in words if "${" in one), "a key")
        return f"{key} has no usable value; type {_with_default(key)}"
    if isinstance(cause, errors.ConfigAttributeError | errors.ConfigKeyError | errors.ConfigTypeError) and key:
        return _unknown_override(key, root_of(cause), words)
    return None


def _about(said: str, words: list[str]) -> str:
    """For an error that has no key: the word that it is probably about. said: its text."""
    for one in words:
        try:
            override = OverridesParser.create().parse_override(one)
        except HydraException:
            continue
        key, value = override.key_or_group, override.value()
        if override.is_sweep_override():
            return f"{one} has several values; type -m {shlex.quote(one)} for a sweep"
        if key in OPTIONS and not override.is_delete() and not isinstance(value, str | list):
            return _no_option(key, show(value), OPTIONS[key])
        if one.startswith("+") and key in said:
            return f"{key} has a value, which + cannot add; type {word(key, value)}"
        if one.startswith("~") and key in said:
            return f"{one} is about what is not there; type the command without {one}"
    preset = [one for one in words if key_of(one) in ("experiment", "local")]
    if preset:
        return f"{preset[0]} chooses an option again; type override before each option in its defaults list"
    named = [one for one in words if key_of(one) in said] or words[-1:]
    return f"{' and '.join(named) or 'the config'} cannot be composed; type the command without {' '.join(named)}"


def key_of(typed: str) -> str:
    return typed.partition("=")[0].lstrip("+~").partition("@")[0]


def _no_option(group: str, option: str, options: Sequence[str]) -> str:
    folder = f"--config-dir=<the folder that holds {join(group, option).replace('.', '/')}.yaml>"
    if not options:
        return f"{option} is no config; type {folder}"
    text = option.lower()
    same = [one for one in options if SPELLED.get(one, one) == SPELLED.get(text, text)]
    meant = [*same, *get_close_matches(text, options, 1), default_of(group) or "<one of them>"]
    known = f"{group} has the options {', '.join(sorted(options))}"
    return f"{group}={option} is no option, and {known}; type {group}={meant[0]}, or {folder}"


def _with_default(key: str) -> str:
    value = default_of(key)
    return f"{key}=<value>" if value is None else word(key, value)


def _unknown_override(key: str, cfg: Any, words: list[str]) -> str:
    """For a key that a word sets and `cfg`, which Hydra has composed so far, does not have."""
    from lockstep.config.nodes import locate, parameters_of

    typed = next((one for one in words if f"{key_of(one)}.".startswith(f"{key}.")), key)
    key, value = key_of(typed), typed.partition("=")[2]
    if typed.startswith("~"):
        return f"{typed} is about a key that is not there; type the command without {typed}"
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent else None
    if OmegaConf.is_dict(node) and "_target_" in node:
        parameters = parameters_of(locate(parent, node["_target_"]))
        if parameters is None or name in parameters:
            return (
                f"{key} is not in the YAML of this option, and its class takes it; type {word(f'+{key}', value or 1)}"
            )
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    known = flatten({one: values[one] for one in values if one != "hydra"})
    return unknown_key(key, value or "<value>", known)


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
