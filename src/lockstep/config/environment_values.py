"""Values that environment variables decide, such as ${oc.env:API_KEY}. They may be secret, so no file gets them.

A run uses the values. What it writes has them as the config has them: ${oc.env:API_KEY}.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from lockstep.config.check import flatten

RESOLVER = "oc.env"


def values_as_written(cfg: DictConfig) -> dict[str, str]:
    """{key: its text} of the values that an environment variable decides, directly or by another key.

    cfg: as composed, with its interpolations.
    """
    written = flatten(OmegaConf.to_container(cfg, resolve=False))
    asked: list[Any] = []

    def read(*arguments: Any) -> Any:
        asked.append(arguments[0])
        return oc.env(*arguments)

    OmegaConf.register_new_resolver(RESOLVER, read, replace=True)
    try:
        return {key: str(text) for key, text in written.items() if "${" in str(text) and _asks(cfg, key, asked)}
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)


def as_written(flat: Mapping[str, Any], written: Mapping[str, str]) -> dict[str, Any]:
    """A flat config in which the values of `written`, and what is below their keys, are text."""
    shown = dict(flat)
    for key in flat:
        for prefix, text in written.items():
            if key == prefix or key.startswith(f"{prefix}."):
                shown[key] = text
    return shown


def _asks(cfg: DictConfig, key: str, asked: list[Any]) -> bool:
    """Whether the value of `key` needs an environment variable. `asked` grows whenever one is read."""
    before = len(asked)
    with suppress(OmegaConfBaseException):  # `resolve` says what is wrong with it
        found = OmegaConf.select(cfg, key)
        if OmegaConf.is_config(found):
            OmegaConf.to_container(found, resolve=True)
    return len(asked) > before
