"""Composes the configs of a sweep's jobs. The scan for plugins leaves this file out."""

import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException


class Composer:
    """Hydra reads and merges twenty files for a config, which takes 0.1 s. Jobs that differ in values only share that.

    master: the config of the sweep as Hydra has composed it, without its jobs. fixed: the overrides that all jobs have.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig, fixed: Sequence[str]) -> None:
        assert isinstance(loader, ConfigLoaderImpl)
        self.loader, self.master = loader, master
        name, hydras = master.hydra.job.config_name, list(master.hydra.overrides.hydra)
        self.files = loader._parse_overrides_and_create_caching_repo(name, hydras)[1]  # it reads the main file
        self.parse = cache(OverridesParser.create().parse_override)
        self.is_group = cache(self._is_group)
        self.composed: dict[tuple[str, ...], bytes] = {}  # pickled, which copies twice as fast as deepcopy
        self._keep_master(fixed)

    def compose(self, words: Sequence[str]) -> DictConfig:
        """What `load_sweep_config` of Hydra's loader returns, or raises, for these overrides."""
        overrides = [self.parse(word) for word in words]
        values = [override for override in overrides if self._is_value(override)]
        others = [override for override in overrides if not self._is_value(override)]
        if all(self._is_option(override) for override in others):
            try:
                config = self._copy([str(override.input_line) for override in others])
                ConfigLoaderImpl._apply_overrides_to_config(values, config)
                _note_overrides(config, overrides)
                return config
            except (HydraException, OmegaConfBaseException):  # Hydra says what is wrong with them
                pass
        return self._load(words)

    def _keep_master(self, fixed: Sequence[str]) -> None:
        """The config of the sweep is that of its jobs, as far as it has no other overrides than they have."""
        words: list[str] = list(self.master.hydra.overrides.task)
        typed = [override for override in map(self.parse, words) if not override.is_sweep_override()]
        plain = {f"{override.get_key_element()}={override.get_value_element_as_str()}" for override in typed}
        choices = OmegaConf.to_container(self.master.hydra.runtime.choices)
        assert isinstance(choices, dict)
        if plain <= set(fixed) and "???" not in choices.values():  # the sweep may vary a group that has no default
            options = [str(override.input_line) for override in typed if not self._is_value(override)]
            self.composed[tuple(options)] = pickle.dumps(self.master)

    def _copy(self, options: Sequence[str]) -> DictConfig:
        """A config with these options, and no values of the command line."""
        key = tuple(options)
        if key not in self.composed:
            self.composed[key] = pickle.dumps(self._load(options))
        return cast(DictConfig, pickle.loads(self.composed[key]))

    def _load(self, words: Sequence[str]) -> DictConfig:
        return self.loader.load_sweep_config(self.master, list(words))

    def _is_value(self, override: Override) -> bool:
        """Whether it changes a value that the config has. Such overrides are set last, whatever is before them."""
        is_change = override.type == OverrideType.CHANGE and override.package is None
        return is_change and not _is_hydras(override) and not self.is_group(override.key_or_group)

    def _is_option(self, override: Override) -> bool:
        """Whether it chooses an option of a group, or is for Hydra itself: values cannot change what it does."""
        chooses = self.is_group(override.key_or_group) and not isinstance(override.value(), dict)
        return chooses or _is_hydras(override)

    def _is_group(self, key: str) -> bool:
        return bool(self.files.get_group_options(key, ObjectType.CONFIG))


def sweep_folder(master: DictConfig) -> Path:
    """master: see `Composer`."""
    return Path(str(master.hydra.sweep.dir))


def without_hydra(config: DictConfig) -> DictConfig:
    """`config` itself, without the node `hydra`."""
    with open_dict(config):
        del config["hydra"]
    return config


def _is_hydras(override: Override) -> bool:
    return override.key_or_group == "hydra" or override.is_hydra_override()


def _note_overrides(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Set what Hydra's own keys say of the overrides."""
    own = [override for override in overrides if not override.is_hydra_override()]
    config.hydra.overrides.task = [override.input_line for override in own]
    options = config.hydra.job.config.override_dirname
    config.hydra.job.override_dirname = get_overrides_dirname(
        overrides=own, kv_sep=options.kv_sep, item_sep=options.item_sep, exclude_keys=options.exclude_keys
    )
