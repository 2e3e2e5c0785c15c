"""Turns config nodes into objects, and keeps the record of a run's config. The only place that calls Hydra for it."""

from typing import Any

import hydra.utils
from hydra.conf import HydraConf
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from lockstep.errors import ConfigError


def instantiate(node: DictConfig | None) -> Any:
    """The object that a node with `_target_` describes, None for no node. Raises ConfigError if the target does."""
    try:
        return None if node is None else hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise


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
