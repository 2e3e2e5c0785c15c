"""From a composed config to a `RunConfig` and to objects, and errors as one sentence each. No torch here, and pydantic
is imported where it checks."""

import importlib
import inspect
import json
import os
import re
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import hydra.utils
import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, errors, open_dict

from lockstep.compat import hydra_may_call_all
from lockstep.config.schema import CONF, FROM_DATA, GET_FIRST, PASSED, Node, RunConfig
from lockstep.errors import ConfigError, first_line, printable, show
from lockstep.files import is_users

GROUPS = [folder for folder in CONF.iterdir() if folder.is_dir() and folder.name not in ("hydra", "local")]
OPTIONS = {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in GROUPS}
HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
CHECKED_BY_TYPE = ("lockstep.", "hydra_plugins.lockstep.", "torch.optim.")  # of others only the arguments' names are
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Kind = TypeVar("Kind")


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


def key_of(typed: str) -> str:
    """The key of an override, a word of the command."""
    return re.split("[=@:]", typed.lstrip("+~"))[0].strip()


def check_value(kind: Any, value: Any, key: str = "") -> Any:
    """The value of `key` as its type has it, a section as its dataclass. Raises ConfigError if it does not fit."""
    if not is_dataclass(kind):
        made, wrong = _validate(value, kind)
        if not wrong:
            return made if isinstance(made, float) else value  # JSON knows fewer types
        said = [one["msg"].removeprefix("Input should be ") for one in wrong if one["type"] != "needs_python_object"]
        accepted = " or ".join(dict.fromkeys(said)).replace("Field required", "longer")
        options = re.findall("'([^']*)'", accepted)
        near = get_close_matches(show(value).lower().strip("'[]"), options, 1, 0.4)
        meant = [word(key, one) for one in (*near, [value], None, *options) if not _validate(one, kind)[1]]
        raise ConfigError(f"{key}={show(value)} should be {accepted}; type {[*meant, f'{key}=<value>'][0]}")
    if not isinstance(value, dict):
        what = f"{key} is a section with keys of its own"
        raise ConfigError(f"{what}; type the command without {word(key, value)}")
    section: Any = kind
    types = get_type_hints(section, include_extras=True)
    for name in [*value, *types]:
        if name not in types:
            raise ConfigError(unknown_key(join(key, name), show(value[name]), flatten(value, key)))
        if name not in value:
            raise ConfigError(f"{join(key, name)} is missing; type the command without ~{join(key, name)}")
        if name in OPTIONS and name != "vars" and types[name] == Node and "_target_" not in (value[name] or HYDRA_KEYS):
            raise ConfigError(f"{name} has no _target_, its class; type +{name}._target_=<module>.<class>")
    return section(**{name: check_value(of, value[name], join(key, name)) for name, of in types.items()})


def _validate(value: Any, kind: Any) -> tuple[Any, list[Any]]:
    """What pydantic makes of a value, and its errors. In JSON a whole number may be a float, and "3" is no number."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(json.dumps(value, default=str), strict=True), []
    except ValidationError as error:
        return None, list(error.errors(include_url=False))


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))


def nodes_in(value: object, key: str = "") -> Iterator[tuple[str, Node]]:
    """(key, node) of every node inside `value`, itself included. Those below vars are one's own."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from nodes_in(item, f"{key}[{index}]")
    if isinstance(value, dict) and key != "vars":
        if "_target_" in value:
            yield key, value
        for name, item in value.items():
            yield from nodes_in(item, join(key, name))


def locate(key: str, path: object) -> Callable[..., Any]:
    """What the dotted `path` names. Raises ConfigError with the error of the import."""
    names, found = str(path).split("."), None
    try:
        found = importlib.import_module(names[0])
        for count, name in enumerate(names[1:], start=2):
            is_missing = inspect.ismodule(found) and not hasattr(found, name)  # a plugin that Hydra has loaded, too
            found = importlib.import_module(".".join(names[:count])) if is_missing else getattr(found, name)
        if not callable(found):
            raise TypeError("it is neither a class nor a function")
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        advice = f"{key}._target_=<module>.<class>"
        if names[0] == "src" and names[1:]:  # which is on the path itself
            advice = f"{key}._target_={'.'.join(names[1:])}"
        elif missing and names[1:] and (missing == names[0] or not str(path).startswith(missing)):
            advice = f"PYTHONPATH=<the folder of {missing}.py> before the command, or pip install {missing}"
        elif inspect.ismodule(found) and (meant := get_close_matches(names[-1], dir(found), 1)):
            advice = f"{key}._target_={found.__name__}.{meant[0]}"
        frames = [at for at in traceback.extract_tb(error.__traceback__) if is_users(at.filename)]
        place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
        reason = f"{place}{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{key}._target_={path} cannot be imported ({reason}); type {advice}") from error
    return found  # type: ignore[no-any-return]


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """By their names; one that takes anything where Python cannot tell."""
    try:
        signature = inspect.signature(target, follow_wrapped=not isinstance(target, type))  # constructors may take more
    except (TypeError, ValueError):
        signature = inspect.signature(lambda *_, **__: None)
    return signature.parameters


def takes(target: Callable[..., Any], name: str) -> bool:
    """Whether an argument of this name may be passed, as far as Python can tell."""
    parameters = parameters_of(target)
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def check_nodes(value: object, section: str = "") -> None:
    """Raise ConfigError if a node inside `value`, a config or a section, names nothing, or has wrong arguments."""
    for key, node in nodes_in(value, section):
        target, path = locate(key, node["_target_"]), str(node["_target_"])
        # Hydra changes no item of a list.
        whole = f"{key.partition('[')[0]}='[{{_target_:{path},<arguments>}}]'" if "[" in key else ""
        parameters = parameters_of(target)
        given = {name: value for name, value in node.items() if name not in HYDRA_KEYS}
        names = [name for name, one in parameters.items() if one.kind not in ANY_NUMBER]
        free = [name for name in names[len(node.get("_args_") or ()) :] if name not in given]
        if unknown := [name for name in given if not takes(target, name)]:
            words = [f"~{join(key, name)}" for name in unknown]
            words += [f"+{join(key, one)}={show(given[unknown[0]])}" for one in get_close_matches(unknown[0], free, 1)]
            other = f", but {', '.join(free)}" if free else ""
            raise ConfigError(f"{path} takes no {' or '.join(unknown)}{other}; type {whole or ' '.join(words)}")
        needed = [name for name in free[key in GET_FIRST :] if name not in PASSED and key != "step"]
        missing = [name for name in needed if parameters[name].default is inspect.Parameter.empty]
        if missing and (key in GET_FIRST or not node.get("_partial_")):
            words = [f"++{join(key, name)}=<value>" for name in missing]
            raise ConfigError(f"{path} needs {' and '.join(missing)}; type {whole or ' '.join(words)}")
        if path.startswith(CHECKED_BY_TYPE) or (key == "dataset" and is_dataclass(target)):
            function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
            annotations = inspect.get_annotations(function, eval_str=True)
            for name, value in given.items():
                comes_later = any(nodes_in(value, name)) or (value is None and name in FROM_DATA)
                if not comes_later:
                    check_value(annotations.get(name, Any), value, join(key, name))


def instantiate(node: Node | Sequence[Node] | None, *first: Any, **later: Any) -> Any:
    """The object that a node describes, a list for a list of nodes, None for none. Raises what the constructor raises.
    first, later: arguments beside those of the node."""
    if not isinstance(node, dict):
        return node and [instantiate(item) for item in node]
    try:  # Hydra would copy what it passes on
        made = hydra.utils.instantiate(node | {"_partial_": True}, _convert_="all", **hydra_may_call_all())
    except InstantiationException as error:  # of an inner node
        raise (error.__cause__ or error) from None
    return made if node.get("_partial_") and not (first or later) else made(*first, **later)


def instantiate_as(kind: type[Kind], node: Node, key: str, *first: Any, **later: Any) -> Kind:
    """As `instantiate`, of `later` only what the target has parameters for. Raises ConfigError if it is no `kind`."""
    target = locate(key, node.get("_target_"))
    made = instantiate(node, *first, **{name: value for name, value in later.items() if takes(target, name)})
    if not isinstance(made, kind):
        wanted = " or ".join(f"{one.__module__}.{one.__qualname__}" for one in get_args(kind) or [kind])
        what = f"gives an object of {type(made).__name__}, and {wanted} is wanted"
        raise ConfigError(f"{key}._target_={node['_target_']} {what}; type {key}._target_=<a class below {wanted}>")
    return made


def with_own_arguments(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A copy of `cfg` in which a class that was typed has arguments of its own alone; those left out are printed. With
    model._target_=my.Net a typed model.width stays, and model.shape if that is an interpolation and my.Net takes it.
    The literal values of the YAML are the other class's; one that inherits this project's constructor keeps them."""
    cfg, typed = cfg.copy(), list[str]()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete():
            typed += [override.key_or_group, *flatten(override.value(), override.key_or_group)]
    for key in dict.fromkeys(one.removesuffix("._target_") for one in typed if one.endswith("._target_")):
        node: Any = OmegaConf.select(cfg, key)
        written: Any = OmegaConf.to_container(node, resolve=False)
        target, found = node["_target_"], locate(key, node["_target_"])
        links = {name for name, value in written.items() if "${" in str(value)}
        module = str(getattr(getattr(found, "__init__", None), "__module__", ""))  # where the constructor is from
        inherits = module.startswith("lockstep.") and not target.startswith("lockstep.")
        kept = parameters_of(found).keys() & (written if inherits else links)
        own = {name for name in written if any(f"{one}.".startswith(f"{join(key, name)}.") for one in typed)}
        left_out = sorted(written.keys() - HYDRA_KEYS - own - kept)
        with open_dict(node):
            for name in left_out:
                del node[name]
            if key == "dataset":  # other keys refer to these; null: the data tells
                node.update(dict.fromkeys(FROM_DATA.intersection(left_out)))
        named = ", ".join(name for name in left_out if name not in links)
        if named and os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # nobody reads it
                print(f"{key}: {target} has its own {named}, not those of the option", flush=True)
    return cfg


def raised_by(error: BaseException) -> str:
    """The package whose code has raised an error, or has called pathlib, which did."""
    names = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for name in reversed(names) if name != "pathlib"), "")


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """The sentence for what Hydra or OmegaConf says of the user's input, with its text below where that says more. None
    for other errors. words: the command's."""
    theirs = isinstance(error, HydraException | errors.OmegaConfBaseException | yaml.YAMLError)
    if not theirs and raised_by(error) not in ("hydra", "omegaconf"):
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
            group, _, option = str(cause.missing_cfg_file).rpartition("/")
            folder = f"--config-dir=<the folder that holds {cause.missing_cfg_file}.yaml>"
            if not (options := sorted(cause.options or OPTIONS.get(group, []))):
                return f"{cause.missing_cfg_file} is no config; type {folder}"
            what = f"{group}={option} is no option, and {group} has the options {', '.join(options)}"
            meant = [*get_close_matches(option.lower(), options, 1), options[0]][0]
            return f"{what}; type {group}={meant}, or {folder}"
        if isinstance(cause, yaml.MarkedYAMLError) and (mark := cause.problem_mark) is not None:
            return f"{mark.name} is no YAML ({cause.problem}); correct line {mark.line + 1}"
        if "@experiment." in str(cause):
            return unknown_key("experiment", "", {})
        if isinstance(cause, OverrideParseException):
            unread = [str(cause.override)]
        if isinstance(cause, errors.MissingMandatoryValue | errors.InterpolationResolutionError) and key:
            return f"{key} has no value ({first_line(cause)}); type {key}=<value>"
        if isinstance(cause, errors.ConfigAttributeError | errors.ConfigKeyError):
            for one in (one for one in typed if f"{key_of(one)}.".startswith(f"{key}.")):
                beside = flatten(OmegaConf.to_container(cause.parent_node, resolve=False), key.rpartition(".")[0])
                return unknown_key(key_of(one), one.partition("=")[2], beside)
            for one in (one for one in typed if "_target_" in one and key.startswith(f"{key_of(one)}.")):  # a node
                return f"{key} is a new key; type {word(f'+{key_of(one)}', one.partition('=')[2])}"
    # Else the text may name a word, or it is about a preset, or the last word.
    presets = [one for one in typed if key_of(one) == "experiment"]
    inside = sorted((one for one in typed[::-1] if key_of(one) in said), key=lambda one: -len(key_of(one)))
    named = printable([*unread, *inside, *presets, *typed[-1:], "conf/local"][0])
    below = said.replace("\n", "\n    ")
    advice = f"type the command without {shlex.quote(named)}"
    if "No match in the defaults list" in said:  # a group of one's own
        advice = f"type {shlex.quote(f'+{named}')}"
    if unread and named.count("{") > named.count("}"):
        advice = f"type '{key_of(named)}=<value>' with its quotes, for a shell cuts words at spaces"
    return f"{named} cannot be composed; {advice}\n    {below}"


def unknown_key(key: str, value: str, known: Mapping[str, Any]) -> str:
    """The sentence for a key that is not in this config. known: the values beside it, by their full keys."""
    section, (parent, _, name) = key.partition(".")[0], key.rpartition(".")
    if section in ("experiment", "local") or key in OPTIONS:  # a group of one's own
        return f"a file below conf/{section} is not for the whole config; type # @package _global_ in its first line"
    target = known.get(f"{parent}._target_")
    is_of_class = (name == "_target_" and "." in parent) or (target and takes(locate(parent, target), name))
    if parent in ("vars", "evaluation.metrics") or is_of_class:
        return f"{key} is a new key; type {word(f'+{key}', value)}"
    keys = [one for one in [*OPTIONS, *known] if not re.search(r"\._|^(hydra|experiment)", one) and one != key]
    ends = {one.rpartition(".")[2]: one for one in reversed(keys)}
    meant = [word(ends[close], value) for close in get_close_matches(name, ends, 1, 0.7)]
    own = [] if parent else [f"{word(f'+vars.{key}', value)} for a key of your own"]
    return f"{key} is no key of this config; type {', or '.join([*meant, *own]) or '--cfg job to see the keys'}"
