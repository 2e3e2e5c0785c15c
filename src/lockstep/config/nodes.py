"""Nodes of a config: what a `_target_` names, which arguments it takes, and the object that it makes."""

import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import hydra.utils
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.compat import hydra_may_call_all
from lockstep.config.check import check_value, flatten, join
from lockstep.config.schema import FROM_DATA, LATER, Node
from lockstep.errors import ConfigError
from lockstep.text import show

HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
CHECKED_BY_TYPE = ("lockstep.", "hydra_plugins.lockstep.", "torch.optim.")  # of others only the arguments' names are
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Kind = TypeVar("Kind")


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
            if not hasattr(found, name) and inspect.ismodule(found):
                found = importlib.import_module(".".join(names[:count]))
            else:
                found = getattr(found, name)
        if not callable(found):
            raise TypeError("it is neither a class nor a function")
    except Exception as error:  # a module of the user's may raise anything
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        advice = f"{key}._target_=<module>.<class>"
        if missing and (missing == names[0] or not str(path).startswith(missing)):
            advice = f"PYTHONPATH=<the folder of {missing}.py> before the command, or pip install {missing}"
        elif inspect.ismodule(found) and (meant := get_close_matches(names[-1], dir(found), 1)):
            advice = f"{key}._target_={found.__name__}.{meant[0]}"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{key}._target_={path} cannot be imported ({reason}); type {advice}") from error
    return found  # type: ignore[no-any-return]


def signature_of(target: Callable[..., Any]) -> inspect.Signature:
    """One that takes anything where Python cannot tell."""
    try:
        return inspect.signature(target, follow_wrapped=not isinstance(target, type))  # constructors may take more
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)


def takes(target: Callable[..., Any], name: str) -> bool:
    """Whether an argument of this name may be passed, as far as Python can tell."""
    parameters = signature_of(target).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def check_nodes(value: object, section: str = "") -> None:
    """Raise ConfigError if a node inside `value`, a whole config or a section of it, names nothing, or does not take
    its arguments, or needs others."""
    for key, node in nodes_in(value, section):
        target, path = locate(key, node["_target_"]), str(node["_target_"])
        parameters = signature_of(target).parameters
        count, later = LATER.get(key, (0, frozenset[str]()))
        given = {name: value for name, value in node.items() if name not in HYDRA_KEYS}
        positional = [name for name, one in parameters.items() if one.kind <= one.POSITIONAL_OR_KEYWORD]
        filled = {*positional[: count + len(node.get("_args_") or ())], *later}
        names = [name for name, one in parameters.items() if one.kind not in ANY_NUMBER]
        free = [name for name in names if name not in given and name not in filled]
        unknown = [name for name in given if not takes(target, name) or (name in filled and name in parameters)]
        if unknown:
            words = [f"~{join(key, name)}" for name in unknown]
            words += [f"+{join(key, one)}={show(given[unknown[0]])}" for one in get_close_matches(unknown[0], free, 1)]
            other = f", but {', '.join(free)}" if free else ""
            raise ConfigError(f"{path} takes no {' or '.join(unknown)}{other}; type {' '.join(words)}")
        missing = [name for name in free if parameters[name].default is inspect.Parameter.empty]
        if missing and (count or not node.get("_partial_")):
            words = [f"+{join(key, name)}=<value>" for name in missing]
            raise ConfigError(f"{path} needs {' and '.join(missing)}; type {' '.join(words)}")
        if path.startswith(CHECKED_BY_TYPE) or (key == "dataset" and is_dataclass(target)):
            function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
            annotations = inspect.get_annotations(function, eval_str=True)
            for name, value in given.items():
                comes_later = any(nodes_in(value, name)) or (value is None and name in FROM_DATA)
                if not comes_later:
                    check_value(annotations.get(name, Any), value, join(key, name))


def instantiate(node: Node | Sequence[Node] | None, *first: Any, **later: Any) -> Any:
    """The object that a node describes, a list for a list of nodes, None for none.

    first, later: arguments beside those of the node. Raises what the constructor raises.
    """
    if node is None or not isinstance(node, dict):
        return None if node is None else [instantiate(item) for item in node]
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
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        what = f"gives an object of {type(made).__name__}, and {wanted} is wanted"
        raise ConfigError(f"{key}._target_={node['_target_']} {what}; type {key}._target_=<a class below {wanted}>")
    return made


def with_own_arguments(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A copy of `cfg` in which a class that was typed has arguments of its own alone; those left out are printed.

    A typed model._target_=my.Net keeps a typed model.width, and model.shape if that is an interpolation and my.Net
    takes it. The literal values of the option's YAML are those of the other class; a class that inherits its
    constructor from one of this project keeps them, too.
    """
    cfg, typed = cfg.copy(), list[str]()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete():
            typed += [override.key_or_group, *flatten(override.value(), override.key_or_group)]
    for key in [one.removesuffix("._target_") for one in typed if one.endswith("._target_")]:
        node: Any = OmegaConf.select(cfg, key)
        written: Any = OmegaConf.to_container(node, resolve=False)
        target, found = node["_target_"], locate(key, node["_target_"])
        links = {name for name, value in written.items() if "${" in str(value)}
        of_constructor = str(getattr(getattr(found, "__init__", None), "__module__", ""))
        inherits = of_constructor.startswith("lockstep.") and not target.startswith("lockstep.")
        kept = signature_of(found).parameters.keys() & (written if inherits else links)
        own = {name for name in written if any(f"{one}.".startswith(f"{join(key, name)}.") for one in typed)}
        left_out = written.keys() - HYDRA_KEYS - own - kept
        with open_dict(node):
            for name in left_out:
                del node[name]
            if key == "dataset":  # other keys refer to these; null: the data tells
                node.update(dict.fromkeys(left_out & FROM_DATA))
        if left_out - links and os.environ.get("RANK", "0") == "0":
            names = ", ".join(sorted(left_out - links))
            with suppress(OSError):  # nobody reads it
                print(f"{key}: {target} has its own {names}, not those of the option", flush=True)
    return cfg
