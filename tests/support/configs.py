"""Configs composed as the command line composes them."""

import pickle
from functools import cache
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.compat import hydra_version_base
from lockstep.config.record import ConfigRecord, record_config
from support.commands import ROOT


def composed(*overrides: str, whole: bool = True) -> Any:
    """The config of `python src/train.py <overrides>`, with run_dir=. unless given.

    whole: nothing is held out of the training data, unless `overrides` say what, and the test set decides.
    Options are composed once, which takes 0.1 s. Hydra's own function then sets the values.
    """
    cli.register_resolvers()
    has_own = not whole or any(word.startswith(("dataset.validation", "dataset.fold")) for word in overrides)
    words = ["run_dir=.", *([] if has_own else ["dataset.validation=null"]), *overrides]
    parsed = OverridesParser.create().parse_overrides(words)
    values = [override for override in parsed if _is_value(override)]
    if any(override.is_sweep_override() for override in values):
        return _resolved(pickle.loads(_composed_once(*words)))
    options = [word for word, override in zip(words, parsed, strict=True) if override not in values]
    cfg = pickle.loads(_composed_once(*options))
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    return _resolved(cfg)


def _resolved(cfg: Any) -> Any:
    """With the objective as it is: a rank does not know this project's resolvers."""
    cfg.objective = cfg.objective
    return cfg


def _is_value(override: Override) -> bool:
    key = override.key_or_group
    return not (key.startswith("hydra") or "/" in key or (ROOT / "conf" / key).is_dir())


@cache
def _composed_once(*overrides: str) -> bytes:
    """Pickled, which copies twice as fast as deepcopy."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), **hydra_version_base()):
        return pickle.dumps(compose("config", overrides=list(overrides)))


def composed_with_hydra() -> Any:
    """The config of `python src/train.py`, with Hydra's own node `hydra`."""
    cli.register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), **hydra_version_base()):
        return compose("config", return_hydra_config=True)


def record_of(cfg: Any) -> ConfigRecord:
    """What `src/train.py` hands to a rank beside `cfg`, as if no override had been typed."""
    hydra_cfg = OmegaConf.create({"overrides": {"task": []}, "runtime": {"choices": {}}})
    return record_config(cfg, cfg, hydra_cfg, ["src/train.py"], [])


def with_values(cfg: Any, *overrides: str) -> Any:
    """A copy of a composed config with other values (trainer.epochs=3)."""
    changed = cfg.copy()
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(changed, key, yaml.safe_load(value))
    return changed
