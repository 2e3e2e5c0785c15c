"""Turns config nodes into objects. The only place that calls Hydra for it."""

import re
from typing import Any, TypeVar

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig

from lockstep.errors import ConfigError

Kind = TypeVar("Kind")


def instantiate(node: DictConfig | ListConfig | None) -> Any:
    """The object that a node with `_target_` describes, a list for a list of nodes, None for no node.

    Raises ConfigError if the target does, and for a key that it has no argument for.
    """
    if node is None:
        return None
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        refused = _refused_key(node, error.__cause__)
        if refused is not None:
            key = node._get_full_key("")
            raise ConfigError(
                f"{key}._target_={node._target_} takes no {refused} ({error.__cause__}); type ~{key}.{refused}"
            ) from error
        raise


def _refused_key(node: Any, error: BaseException | None) -> str | None:
    """The key of `node` that its target passed on to a function without such an argument."""
    refused = re.search("got an unexpected keyword argument '([^']+)'", str(error))
    if refused is None or not isinstance(error, TypeError) or refused[1] not in node:
        return None
    return refused[1]


def instantiate_as(kind: type[Kind], node: DictConfig, key: str) -> Kind:
    """As `instantiate`, for the node `key`. Raises ConfigError if the object is no `kind`."""
    made = instantiate(node)
    if isinstance(made, kind):
        return made
    group = key.partition(".")[0]
    raise ConfigError(
        f"{key}._target_={node._target_} gives an object of {type(made).__name__}, and "
        f"{kind.__module__}.{kind.__qualname__} is wanted; type {group}=<an option in conf/{group}>"
    )
