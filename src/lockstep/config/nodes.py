"""Nodes of a config: what a `_target_` names, which arguments it takes, and the object that it makes.

Functions import what a node names: nothing is imported before.
"""

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.compat import hydra_may_call_all
from lockstep.config.schema import CONF, FROM_DATA, Node
from lockstep.errors import ConfigError

HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
CHECKED_BY_TYPE = ("lockstep.", "torch.optim.")  # of another class only the names of its arguments are known
# What the program passes: (positional arguments, those by name). A node that gets a positional one is called later.
LATER: dict[str, tuple[int, frozenset[str]]] = {
    "optimizer": (1, frozenset()),
    "scheduler": (1, frozenset({"steps_per_epoch", "total_steps", "objective_mode"})),
    "scheduler.schedule": (1, frozenset()),
    "dataset.collate_fn": (1, frozenset()),
}

Parameters = Mapping[str, inspect.Parameter]
Kind = TypeVar("Kind")


def join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


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
    group = key.partition(".")[0]
    other = f"{group}=<an option in conf/{group}>" if (CONF / group).is_dir() else f"{key}._target_=<module>.<class>"
    names = str(path).split(".")
    found: Any = None
    try:
        if len(names) < 2 or not all(names):
            raise ImportError("it has no module")
        found = importlib.import_module(names[0])
        for count, name in enumerate(names[1:], start=2):
            if not hasattr(found, name) and inspect.ismodule(found):
                importlib.import_module(".".join(names[:count]))
            found = getattr(found, name)
    except Exception as error:  # a module of the user's may raise anything
        advice = other
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing == names[0]:
            advice = f"--config-dir=<its folder>/conf, or PYTHONPATH=<the folder of {missing}> before the command"
        elif missing and not str(path).startswith(missing):
            advice = f"pip install {missing.partition('.')[0]}"
        elif inspect.ismodule(found):
            meant = get_close_matches(names[-1], [name for name in dir(found) if callable(getattr(found, name))], 1)
            advice = f"{key}._target_={found.__name__}.{meant[0]}" if meant else other
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{key}._target_={path} cannot be imported ({type(error).__name__}: {reason}); type {advice}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{key}._target_={path} is neither a class nor a function; type {other}")
    return found  # type: ignore[no-any-return]


def parameters_of(target: Callable[..., Any]) -> Parameters | None:
    """None if any name may be passed, or if Python cannot tell."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    return None if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) else parameters


def check_nodes(group: str, value: object) -> None:
    """Raise ConfigError if a node inside `value`, the config of `group`, names nothing or has wrong arguments."""
    for key, node in nodes_in(value, group):
        positional, by_name = LATER.get(key, (0, frozenset[str]()))
        check_node(key, node, by_name, positional)


def check_node(key: str, node: Node, later: Collection[str] = (), positional: int = 0) -> None:
    """Raise ConfigError if the target of a node does not take its arguments, or needs others.

    later: names of the arguments that the program passes. positional: how many it passes before them.
    """
    from lockstep.config.check import check_values, show

    target = locate(key, node["_target_"])
    parameters = parameters_of(target)
    given = {name: value for name, value in node.items() if name not in HYDRA_KEYS}
    if parameters is None:
        return
    name = node["_target_"]
    by_position = [
        one.name for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    filled = {*by_position[: positional + len(node.get("_args_") or ())], *later}
    free = [one for one in parameters if one not in given and one not in filled]
    unknown = [one for one in given if one not in parameters or one in filled]
    if unknown:
        meant = get_close_matches(unknown[0], free, 1)
        takes = f"it takes {', '.join(free)}" if free else "it takes no other"
        more = f" +{join(key, meant[0])}={show(given[unknown[0]])}" if meant else ""
        removed = " ".join(f"~{join(key, one)}" for one in unknown)
        raise ConfigError(f"{name} takes no {' and no '.join(unknown)}, {takes}; type {removed}{more}")
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        one
        for one in free
        if parameters[one].default is inspect.Parameter.empty and parameters[one].kind not in optional
    ]
    if missing and not (node.get("_partial_") and not positional):
        words = " ".join(f"+{join(key, one)}=<value>" for one in missing)
        raise ConfigError(f"{name} needs {' and '.join(missing)}; type {words}")
    if str(name).startswith(CHECKED_BY_TYPE):
        known = {
            one: value
            for one, value in given.items()
            if not (value is None and one in FROM_DATA) and not (isinstance(value, dict) and "_target_" in value)
        }
        check_values(key, known, _model_of(target, tuple(known)))


@cache
def _model_of(target: Callable[..., Any], names: tuple[str, ...]) -> type[Any]:
    """A pydantic model with the annotations of these parameters."""
    import pydantic

    annotations = inspect.get_annotations(target.__init__ if isinstance(target, type) else target, eval_str=True)  # type: ignore[misc]
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
    called_later = bool(first or later)  # Hydra would copy what it passes on
    try:
        if called_later:
            node = node | {"_partial_": True}
        made = hydra.utils.instantiate(node, _convert_="all", **hydra_may_call_all())
    except InstantiationException as error:
        raise (error.__cause__ or error) from None
    return made(*first, **later) if called_later else made


def instantiate_as(kind: type[Kind], node: Node, key: str, *first: Any, **later: Any) -> Kind:
    """As `instantiate`, of `later` only what the target has parameters for. Raises ConfigError if it is no `kind`."""
    parameters = parameters_of(locate(key, node["_target_"]))
    taken = {name: value for name, value in later.items() if parameters is None or name in parameters}
    made = instantiate(node, *first, **taken)
    if isinstance(made, kind):
        return made
    group = key.partition(".")[0]
    raise ConfigError(
        f"{key}._target_={node['_target_']} gives an object of {type(made).__name__}, and {kind.__module__}."
        f"{kind.__qualname__} is wanted; type {group}=<an option in conf/{group}>"
    )


def with_own_arguments(cfg: DictConfig, typed: Mapping[str, Any]) -> tuple[DictConfig, list[str]]:
    """A copy of `cfg` in which a class that was typed has arguments of its own alone, and a line for each such node.

    typed: {key: value} of the command. A typed model._target_=my.Net keeps the typed model.width, and model.shape if
    that is an interpolation and my.Net takes it. The literal values of the option's YAML are those of the other class.
    """
    cfg, lines = cfg.copy(), []
    for key in [key.removesuffix("._target_") for key in typed if key.endswith("._target_")]:
        node = OmegaConf.select(cfg, key)
        if not OmegaConf.is_dict(node):
            continue
        target = OmegaConf.select(cfg, f"{key}._target_")
        parameters = parameters_of(locate(key, target)) or {}
        written: Any = OmegaConf.to_container(node, resolve=False)
        dropped = []
        for name, value in written.items():
            own = any(f"{one}.".startswith(f"{join(key, name)}.") for one in typed)
            link = isinstance(value, str) and "${" in value
            if name not in HYDRA_KEYS and not own and not (link and name in parameters):
                with open_dict(node):
                    del node[name]
                dropped += [] if link else [str(name)]
        if dropped:
            lines.append(f"{key}: {target} begins with its own {', '.join(dropped)}, not with those of the option")
    return cfg, lines
