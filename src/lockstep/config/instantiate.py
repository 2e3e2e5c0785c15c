"""Turns config nodes into objects, and keeps the record of a run's config. The only place that calls Hydra for it."""

from typing import Any, TypeVar

import hydra.utils
from hydra.conf import HydraConf
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from lockstep.errors import ConfigError

Kind = TypeVar("Kind")


def instantiate(node: DictConfig | None) -> Any:
    """The object that a node with `_target_` describes, None for no node. Raises ConfigError if the target does."""
    try:
        return None if node is None else hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise


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


def hydra_record(cfg: DictConfig, hydra_cfg: HydraConf) -> dict[str, str]:
    """{file name: text} of what Hydra writes to a run's `.hydra`.

    Rank 0 writes it itself, once it holds the run folder's lock: a refused command must not overwrite the record of a
    running one. Interpolations such as ${oc.env:KEY} stay unresolved.
    """
    return {
        "config.yaml": OmegaConf.to_yaml(cfg),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra_cfg})),
        "overrides.yaml": OmegaConf.to_yaml(hydra_cfg.overrides.task),
    }
