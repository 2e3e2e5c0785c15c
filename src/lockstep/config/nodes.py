"""Nodes of a config: what a `_target_` names, which arguments it takes, and the object that it makes."""

import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

import hydra.utils
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.compat import hydra_may_call_all
from lockstep.config.check import check_values, default_of, flatten, join, show
from lockstep.config.schema import FROM_DATA, LATER, Node
from lockstep.errors import ConfigError

HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
CHECKED_BY_TYPE = ("lockstep.", "torch.optim.")  # of another class only the names of its arguments are known
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Kind = TypeVar("Kind")


def nodes_in(value: object, key: str) -> Iterator[tuple[str, Node]]:
    """(key, node) of every node inside `value`, itself included."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from nodes_in(item, f"{key}[{index}]")
    if isinstance(value, dict):
        if "_target_" in value:
            yield key, value
        for name, item in value.items():
            yield from nodes_in(item, join(key, name))


def locate(key: str, path: object) -> Callable[..., Any]:
    """What the dotted `path` names. Raises ConfigError with the error of the import."""
    group, names, found = key.partition(".")[0], str(path).split("."), None
    advice = f"{group}={default_of(group)}" if key == group else f"{key}._target_=<module>.<class>"
    try:
        if len(names) < 2 or not all(names):
            raise ImportError("it names no module and class")
        found = importlib.import_module(names[0])
        for count, name in enumerate(names[1:], start=2):
            if not hasattr(found, name) and inspect.ismodule(found):
                importlib.import_module(".".join(names[:count]))
            found = getattr(found, name)
        if not callable(found):
            raise TypeError("it is neither a class nor a function")
    except Exception as error:  # a module of the user's may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing == names[0]:
            advice = f"--config-dir=<a folder beside {missing}.py>, or PYTHONPATH=<its folder> before the command"
        elif missing and not str(path).startswith(missing):
            advice = f"pip install {missing.partition('.')[0]}"
        elif inspect.ismodule(found):
            known = [name for name in dir(found) if callable(getattr(found, name))]
            meant = get_close_matches(names[-1], known, 1)
            advice = f"{key}._target_={found.__name__}.{meant[0]}" if meant else advice
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{key}._target_={path} cannot be imported ({reason}); type {advice}") from error
    return found  # type: ignore[no-any-return]


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """None if any name may be passed, or if Python cannot tell."""
    named = named_by(target)
    return None if named is None or any(one.kind is one.VAR_KEYWORD for one in named.values()) else named


def named_by(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters in a signature, None if Python cannot tell."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def check_nodes(group: str, value: object) -> None:
    """Raise ConfigError if a node inside `value`, the config of `group`, names nothing, or does not take its arguments,
    or needs others."""
    for key, node in nodes_in(value, group):
        target = locate(key, node["_target_"])
        parameters = named_by(target)
        if parameters is None:
            continue
        count, later = LATER.get(key, (0, frozenset[str]()))
        given = {name: value for name, value in node.items() if name not in HYDRA_KEYS}
        positional = [name for name, one in parameters.items() if one.kind <= one.POSITIONAL_OR_KEYWORD]
        filled = {*positional[: count + len(node.get("_args_") or ())], *later}
        free = [name for name in parameters if name not in given and name not in filled]
        unknown = [name for name in given if name not in parameters or name in filled]
        if unknown and parameters_of(target) is not None:
            meant = get_close_matches(unknown[0], free, 1)
            words = [f"~{join(key, name)}" for name in unknown]
            words += [f"+{join(key, name)}={show(given[unknown[0]])}" for name in meant]
            takes = f", but {', '.join(free)}" if free else ""
            raise ConfigError(f"{node['_target_']} takes no {' or '.join(unknown)}{takes}; type {' '.join(words)}")
        needed = [name for name in free if parameters[name].default is parameters[name].empty]
        missing = [name for name in needed if parameters[name].kind not in ANY_NUMBER]
        if missing and (count or not node.get("_partial_")):
            words = [f"+{join(key, name)}=<value>" for name in missing]
            raise ConfigError(f"{node['_target_']} needs {' and '.join(missing)}; type {' '.join(words)}")
        if str(node["_target_"]).startswith(CHECKED_BY_TYPE):
            null = {name for name in FROM_DATA if given.get(name) is None}  # the data will tell
            nodes = {name for name, value in given.items() if any(nodes_in(value, name))}  # objects later
            names = tuple(name for name in given if name not in null | nodes)
            check_values(key, {name: node[name] for name in names}, _model_of(target, names), node["_target_"])


@cache
def _model_of(target: Callable[..., Any], names: tuple[str, ...]) -> Any:
    """A pydantic model with the annotations of these parameters."""
    import pydantic

    function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    annotations = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {f"{name}_": (annotations.get(name, Any), pydantic.Field(alias=name)) for name in names}
    config = pydantic.ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=())
    return pydantic.create_model("Arguments", __config__=config, **fields)


def instantiate(node: Node | Sequence[Node] | None, *first: Any, **later: Any) -> Any:
    """The object that a node describes, a list for a list of nodes, None for none.

    first, later: arguments beside those of the node. Raises what the constructor raises.
    """
    if node is None:
        return None
    if not isinstance(node, dict):
        return [instantiate(item) for item in node]
    called_later, problem = bool(first or later), None  # Hydra would copy what it passes on
    try:
        changed = node | {"_partial_": True} if called_later else node
        made = hydra.utils.instantiate(changed, _convert_="all", **hydra_may_call_all())
    except InstantiationException as error:
        problem = error.__cause__ or error
    if problem is not None:  # raised in the block above, it would be an error of Hydra's by its context
        raise problem
    return made(*first, **later) if called_later else made


def instantiate_as(kind: type[Kind], node: Node, key: str, *first: Any, **later: Any) -> Kind:
    """As `instantiate`, of `later` only what the target has parameters for. Raises ConfigError if it is no `kind`."""
    parameters = parameters_of(locate(key, node["_target_"]))
    made = instantiate(node, *first, **{k: v for k, v in later.items() if parameters is None or k in parameters})
    if isinstance(made, kind):
        return made
    group, wanted = key.partition(".")[0], f"{kind.__module__}.{kind.__qualname__}"
    advice = f"{group}={default_of(group)}" if key == group else f"{key}._target_=<a class below {wanted}>"
    raise ConfigError(
        f"{key}._target_={node['_target_']} gives an object of {type(made).__name__}, and {wanted} is wanted; "
        f"type {advice}"
    )


def with_own_arguments(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A copy of `cfg` in which a class that was typed has arguments of its own alone; those left out are printed.

    A typed model._target_=my.Net keeps a typed model.width, and model.shape if that is an interpolation and my.Net
    takes it. The literal values of the option's YAML are those of the other class; a class that inherits its
    constructor from one of this project keeps them, too.
    """
    cfg, typed = cfg.copy(), dict[str, Any]()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value, key = override.value(), override.key_or_group
        typed |= {} if override.is_delete() else {key: value} | flatten(value, key)  # an empty dict has no keys
    for key in [key.removesuffix("._target_") for key in typed if key.endswith("._target_")]:
        node, target = OmegaConf.select(cfg, key), OmegaConf.select(cfg, f"{key}._target_")
        found = locate(key, target)
        parameters = named_by(found) or {}
        written: Any = OmegaConf.to_container(node, resolve=False)
        links = {name for name, value in written.items() if "${" in str(value)}
        of_constructor = str(getattr(getattr(found, "__init__", None), "__module__", ""))
        inherits = of_constructor.startswith("lockstep.") and not str(target).startswith("lockstep.")
        kept = parameters.keys() & (written if inherits else links)
        own = {name for name in written if any(f"{one}.".startswith(f"{join(key, name)}.") for one in typed)}
        left_out = written.keys() - HYDRA_KEYS - own - kept
        with open_dict(node):
            for name in left_out:
                del node[name]
        if left_out - links and os.environ.get("RANK", "0") == "0":
            names = ", ".join(sorted(left_out - links))
            with suppress(OSError):  # nobody reads it
                print(f"{key}: {target} has its own {names}, not those of the option", flush=True)
    return cfg
