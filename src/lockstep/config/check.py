"""From a composed config to a `RunConfig`: pydantic checks it, and an error is one sentence that ends in what to type.

No torch here, and pydantic inside functions: `--help` and ranks need neither.
"""

import copy
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from lockstep.config.nodes import join, with_own_arguments
from lockstep.config.schema import CONF, Node, RunConfig, build
from lockstep.errors import ConfigError, path_value

FOLDERS = ("data_dir", "run_dir", "resume")  # in which ~ is the home folder
SPELLED = {"yes": True, "on": True, "no": False, "off": False, "none": None, "nil": None, "never": None}
OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in CONF.iterdir() if folder.is_dir()
}


def check(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """The typed values of a composed config. overrides: those typed. Raises ConfigError for what cannot work."""
    return check_composed(cfg, overrides)[1]


def check_composed(cfg: DictConfig, overrides: Sequence[str]) -> tuple[DictConfig, RunConfig]:
    """`check`, with the config as it is kept: a class that was typed has its own arguments alone."""
    cfg, lines = with_own_arguments(cfg, typed_values(overrides))
    for line in lines if os.environ.get("RANK", "0") == "0" else ():
        print(line, flush=True)
    values = cast(Node, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    values.setdefault("logger", {})  # logger=[] leaves no section
    for key in FOLDERS:
        if isinstance(values.get(key), str):
            values[key] = os.path.expanduser(values[key])
    check_values("", values, RunConfig)
    config = build(RunConfig, values)
    config.refuse_contradictions()
    return cfg, config


def typed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """{key: value} of typed overrides; those inside a typed {...} by their own keys."""
    found: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete() and not override.is_sweep_override():
            found |= flatten(override.value(), override.key_or_group)
    return found


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"trainer.epochs": 5, ...}: the values of a config by their full keys."""
    if not isinstance(node, dict | DictConfig):
        return {prefix: node}
    return {key: found for name, value in node.items() for key, found in flatten(value, join(prefix, name)).items()}


def show(value: object) -> str:
    """A value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


# ---- Values


@cache
def _adapter(kind: type[Any]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def check_values(section: str, values: Node, kind: type[Any]) -> None:
    """Raise ConfigError if `values`, at the key `section`, do not fit `kind`, a dataclass or a pydantic model."""
    errors = _errors(values, kind)
    if errors:
        raise ConfigError(_sentence(section, values, kind, errors))


def _errors(values: Node, kind: type[Any]) -> list[Any]:
    from pydantic import ValidationError

    try:
        # JSON: an object is a dataclass, and a whole number a float, but the text "3" is no number.
        _adapter(kind).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        return list(error.errors(include_url=False))
    return []


def _place(values: Node, error: Any) -> tuple[str, ...]:
    """The key of an error, without what pydantic adds for the members of a union."""
    node: Any = values
    place = []
    for name in error["loc"]:
        inside = name in node if isinstance(node, dict) else isinstance(node, list) and isinstance(name, int)
        if inside or (error["type"] in ("missing", "missing_argument") and isinstance(node, dict)):
            place.append(str(name))
            node = node[name] if inside else None
    return tuple(place)


def _sentence(section: str, values: Node, kind: type[Any], errors: list[Any]) -> str:
    """About the key of the first error: what stands there, what is accepted, and what to type."""
    place = _place(values, errors[0])
    key, types = join(section, ".".join(place)), {error["type"] for error in errors if _place(values, error) == place}
    if types & {"extra_forbidden", "unexpected_keyword_argument"}:
        return unknown_key(key, show(_at(values, place)), flatten(values, section))
    if types & {"missing", "missing_argument"}:
        return f"{key} is missing; type {'~' if False else '+'}{key}={show(default_of(key))}"
    value = _at(values, place)
    mine = [error for error in errors if _place(values, error) == place]
    accepted = " or ".join(dict.fromkeys(error["msg"].removeprefix("Input should be ") for error in mine))

    def accepts(candidate: object) -> bool:
        changed = copy.deepcopy(values)
        _set(changed, place, candidate)
        return all(_place(changed, error)[: len(place)] != place for error in _errors(changed, kind))

    meant = next(filter(accepts, _candidates(value, mine, default_of(key))), None)
    known = meant is not None or accepts(None)
    typed = re.sub(r"\.(\d+)\b.*", "", key)  # Hydra reads no override of an item of a list
    if typed != key:
        whole = copy.deepcopy(_at(values, place[: typed.count(".") + 1 - (section.count(".") + 1 if section else 0)]))
        example = show(default_of(typed)) if not known else "[...]"
        return f"{key}={show(value)} should be {accepted}; type {typed}={example if example != 'null' else show(whole[:0])}"
    return f"{key}={show(value)} should be {accepted}; type {word(key, meant) if known else f'{key}=<value>'}"


def _candidates(value: Any, errors: list[Any], default: object) -> Iterator[object]:
    """Values that may have been meant, the likeliest first."""
    text = show(value).lower()
    words = [
        name for error in errors for name in re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    ]
    yield from get_close_matches(text, words, 1)
    yield from [found for found in words if found in text or text in found][:1]
    if text in SPELLED:
        yield SPELLED[text]
    if isinstance(value, str) and (number := re.match(r"-?\d+(\.\d+)?(e-?\d+)?", text)):
        yield from (int(number[0]) if number[0].isdigit() else float(number[0]), float(number[0]) / 100, [value])
    if isinstance(value, float) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            yield round(value)
    yield from value[:1] if isinstance(value, list) else [[value]] if value is not None else []
    yield default
    for error in errors:
        for name, limit in error.get("ctx", {}).items():
            if name in ("ge", "le", "gt", "lt"):
                yield {"ge": limit, "le": limit, "gt": limit + 1, "lt": limit / 2}[name]
    yield from (words[:1] or [True if any(error["type"].startswith("bool") for error in errors) else None])


def _at(values: Any, place: Sequence[str]) -> Any:
    for name in place:
        values = (
            values[int(name)] if isinstance(values, list) else values[name] if name in values else values[int(name)]
        )
    return values


def _set(values: Any, place: Sequence[str], value: object) -> None:
    inner = _at(values, place[:-1])
    inner[int(place[-1]) if isinstance(inner, list) else place[-1]] = value


def word(key: str, value: object) -> str:
    """`key=value` for a shell."""
    return shlex.quote(f"{key}={show(value)}")


def default_of(key: str) -> object:
    """The value of a key in conf/; None if it has none, or if it depends on another one."""
    section, _, rest = key.partition(".")
    files = [CONF / "config.yaml", *sorted((CONF / section).glob("*.yaml"))]
    for path, names in zip(files, [key.split("."), *[rest.split(".")] * (len(files) - 1)], strict=True):
        node = yaml.safe_load(path.read_text()) or {}
        for name in names:
            node = node.get(name) if isinstance(node, dict) else None
        if node is not None and "${" not in str(node):
            return node
    return None


# ---- Keys, options and words


def unknown_key(key: str, value: str, known: Iterable[str]) -> str:
    """The sentence for a key that this config does not have."""
    if key.partition(".")[0] in ("experiment", "local"):
        return f"{key} is set by a file below conf/{key.partition('.')[0]} that is not for the whole config; type # @package _global_ in its first line"
    meant = suggestion(key, known)
    value = value or "<value>"
    own = "" if "." in key else f", or +vars.{key}={value} for a key of your own"
    if meant is None:
        return f"{key} is no key of this config; type {own.removeprefix(', or ') or '--cfg job to see the keys'}"
    return f"{key} is no key of this config; type {shlex.quote(f'{meant}={value}')}{own}"


def suggestion(key: str, known: Iterable[str]) -> str | None:
    """The key that was probably meant: one that ends alike, else the nearest."""
    keys = [one for one in known if one != key and not one.rpartition(".")[2].startswith("_")]
    last = key.rpartition(".")[2]
    same = [one for one in keys if one.rpartition(".")[2] == last]
    near = get_close_matches(key, keys, 1, 0.7)
    names = get_close_matches(last, dict.fromkeys(one.rpartition(".")[2] for one in keys), 1, 0.75)
    alike = [one for one in keys if names and one.rpartition(".")[2] == names[0]]
    in_section = [one for one in (*same, *alike) if one.rpartition(".")[0] == key.rpartition(".")[0]]
    return next(iter([*in_section, *sorted(same, key=len), *near, *sorted(alike, key=len)]), None)


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """The sentence for what Hydra or OmegaConf says of the user's input, with its text below. None for other errors.

    words: the command's.
    """
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ConfigError):
            return str(cause)
    told = next((sentence for cause in causes if (sentence := _told(cause, list(words)))), None)
    if told is None and not isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        return None
    sentence, shows_text = told or (
        f"{_wrong_word(words) or 'the config'} cannot be composed; type --info to see how",
        True,
    )
    text = "\n".join(f"    {line}" for line in str(error).strip().splitlines()) if shows_text else ""
    return f"{sentence}\n{text}" if text else sentence


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _told(cause: BaseException, words: list[str]) -> tuple[str, bool] | None:
    """(sentence, whether the library's own text says more)."""
    if isinstance(cause, yaml.YAMLError):
        mark = getattr(cause, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}," if mark else "a config file"
        return (
            f"{where} is no YAML; type one `key: value` a line, with spaces, and every bracket and quote closed",
            True,
        )
    if isinstance(cause, MissingConfigException):
        return _missing_option(cause, words)
    if isinstance(cause, OverrideParseException):
        return _unreadable(str(cause.override), words)
    key = getattr(cause, "full_key", None)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no value; type {key}=<value>", False
    if isinstance(cause, InterpolationResolutionError):
        return f"{key} has no usable value; type {key}=<value>", True
    if isinstance(cause, ConfigAttributeError | ConfigKeyError | ConfigTypeError) and key:
        return _unknown_override(key, words)
    return None


def _unknown_override(key: str, words: list[str]) -> tuple[str, bool]:
    typed = next((one for one in words if f"{one.lstrip('+~').partition('=')[0]}.".startswith(f"{key}.")), None)
    typed = typed or next((one for one in words if f"{key}.".startswith(one.lstrip("+~").partition("=")[0] + ".")), "")
    key, _, value = typed.lstrip("+~").partition("=") if typed else (key, "", "")
    if typed.startswith("~"):
        return f"{typed} removes what is not there; leave it out, or type --cfg job to see the keys", False
    cfg = composed(words)
    if cfg is None:
        return f"{key} is no key of this config; type --cfg job to see the keys", True
    values = flatten(OmegaConf.to_container(cfg, resolve=False))
    if key in OPTIONS:
        return f"config.yaml chooses no option of {key}; type +{key}={value}", False
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent else None
    if OmegaConf.is_dict(node) and "_target_" in node:
        from lockstep.config.nodes import locate, parameters_of

        parameters = parameters_of(locate(parent, node["_target_"]))
        if parameters is None or name in parameters:
            return (
                f"{key} is not in the YAML of this option, and {node['_target_']} takes it; type +{key}={value}",
                False,
            )
    return unknown_key(key, value, values), False


def _missing_option(error: MissingConfigException, words: list[str]) -> tuple[str, bool]:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or OPTIONS.get(group, []))
    if not options:
        return f"there is no config {error.missing_cfg_file}; type --config-dir=<the folder that holds it>", True
    meant = get_close_matches(option, options, 1)
    folder = (
        "" if any("config-dir" in one for one in words) else f", or --config-dir=<a folder with {group}/{option}.yaml>"
    )
    known = f"{group} has the options {', '.join(options)}"
    return (
        f"{group}={option} is no option: {known}; type {group}={meant[0] if meant else '<one of them>'}{folder}",
        False,
    )


def _unreadable(typed: str, words: list[str]) -> tuple[str, bool]:
    """For a word that Hydra cannot parse: a word near to it that it can."""
    key, equals, value = typed.partition("=")
    if not equals:
        rest = words[words.index(typed) + 1 :] if typed in words else []
        cfg = composed(words)
        known = flatten(OmegaConf.to_container(cfg, resolve=False)) if cfg is not None else {}
        plain = typed.replace(":", "=", 1)
        if ":" in typed and plain.partition("=")[0] in known:
            return f"{typed} has no =; type {plain}", False
        if typed in known or typed in OPTIONS:
            given = rest[0] if rest and "=" not in rest[0] else show(default_of(typed)) if typed in known else "<value>"
            return f"{typed} has no value; type {typed}={given}", False
        return unknown_key(typed, "<value>", known), False
    inner = value.strip("[](){} ,'\"")
    for meant in (
        f"{key.strip()}={value.strip()}",
        f"{key}=[{inner}]",
        f"{key}={inner}",
        f"{key}='{value}'",
        f'{key}="{inner}"',
    ):
        if meant != typed and _parses(meant):
            return f"{typed} cannot be read; type {shlex.quote(meant)}", True
    return f"{typed} cannot be read; type {key}=<value>, with every bracket and quote closed", True


def _parses(text: str) -> bool:
    with suppress(HydraException):
        OverridesParser.create().parse_override(text)
        return True
    return False


def _wrong_word(words: Sequence[str]) -> str | None:
    """The first word without which the others compose."""
    overrides = [one for one in words if not one.startswith("-")]
    for one in overrides:
        if composed([other for other in overrides if other is not one]) is not None:
            return one
    return None


def composed(words: Sequence[str]) -> DictConfig | None:
    """The config of those of the words that choose an option, None if Hydra cannot compose them."""
    chosen = [one for one in words if one.lstrip("+").partition("=")[0] in OPTIONS and "=" in one]
    try:
        with hydra_composed(["run_dir=.", *chosen]) as cfg:
            return cfg
    except Exception:
        return None


@contextmanager
def hydra_composed(words: Sequence[str], folders: Iterable[Path] = ()) -> Iterator[DictConfig]:
    """What Hydra composes of the overrides among the words, as `main` gets it. folders: of other configs.

    In the block HydraConfig is of it. Then Hydra knows again what it knew, such as of a `hydra.main` around this.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.version import VersionBase

    from lockstep.compat import hydra_version_base

    before, base, known = GlobalHydra.instance(), VersionBase.instance(), HydraConfig.instance().cfg
    GlobalHydra.set_instance(copy.copy(before))
    GlobalHydra.instance().clear()
    VersionBase.set_instance(copy.copy(base))
    overrides = ["hydra.runtime.output_dir=${hydra:run.dir}", *[one for one in words if not one.startswith("-")]]
    if searched := ",".join(path_value(f"file://{folder.resolve()}") for folder in folders):
        overrides.append(f"hydra.searchpath=[{searched}]")
    try:
        with hydra.initialize_config_dir(str(CONF), **hydra_version_base()):
            cfg = hydra.compose("config", overrides=overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        yield cfg
    finally:
        GlobalHydra.set_instance(before)
        VersionBase.set_instance(base)
        HydraConfig.instance().cfg = known
