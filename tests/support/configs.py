"""Configs composed and checked as the command line does."""

import pickle
from dataclasses import asdict
from functools import cache

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lockstep import cli
from lockstep.compat import hydra_version_base
from lockstep.config.check import check, instantiate, with_own_arguments
from lockstep.config.record import record_config
from lockstep.launchers.base import EnvLauncher
from lockstep.modes.base import Parts
from support.commands import ROOT, WHOLE

# What must be typed beside an option.
NEEDS = {
    "dataset=random": ["model=linear"],
    "dataset=huggingface": ["dataset.path=rows"],
    "dataset=image_folder": ["dataset.root=pictures"],
    "experiment=image_folder_resnet": ["dataset.root=pictures"],
    "experiment=image_folder_speed": ["dataset.root=pictures"],
    "dataset=image_csv": ["dataset.root=pictures"],
    "dataset=image_list": ["dataset.root=pictures"],
    "dataset=table": ["dataset.path=rows.csv", "dataset.target=y"],
    "dataset=pair": [f"dataset.{split}._target_=support.own_data.Points" for split in ("train", "test")],
    "scheduler=torch": ["scheduler.schedule={_target_:torch.optim.lr_scheduler.StepLR,step_size:3}"],
}


def composed(*overrides, whole=True):
    """The config of `python src/train.py <overrides>`, with run_dir=. unless given.

    whole: nothing is held out of the training data, unless `overrides` say what, and each evaluation reads the test
    set.
    """
    words = words_of(*overrides, whole=whole)
    return _checked(as_composed(*words), words)


def _checked(cfg, words=()):
    cfg = with_own_arguments(cfg, words)
    config = check(cfg)
    object.__setattr__(config, "composed", cfg)  # with its interpolations, for `with_values` and `record_of`
    return config


def words_of(*overrides, whole=True):
    """The words of `composed`."""
    own = ("loader.validation", "loader.fold", "dataset.validation")
    has_own = not whole or any(word.startswith(own) or word.endswith("OnTest") for word in overrides)
    return ["run_dir=.", *([] if has_own else WHOLE), *overrides]


def as_composed(*words):
    """What Hydra makes of the words: interpolations as they are, nothing checked.

    Options are composed once, which takes 0.1 s. Hydra's own function then sets the values.
    """
    cli.register_resolvers()
    parsed = OverridesParser.create().parse_overrides(list(words))
    values = [override for override in parsed if _is_value(override)]
    if any(override.is_sweep_override() for override in values):
        return pickle.loads(_composed_once(*words))
    options = [word for word, override in zip(words, parsed, strict=True) if override not in values]
    cfg = pickle.loads(_composed_once(*options))
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    return cfg


def _is_value(override):
    key = override.key_or_group
    return not (key.startswith("hydra") or "/" in key or (ROOT / "conf" / key).is_dir())


@cache
def _composed_once(*overrides):
    """Pickled, which copies twice as fast as deepcopy."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), **hydra_version_base()):
        return pickle.dumps(compose("config", overrides=list(overrides)))


def composed_with_hydra():
    """The config of `python src/train.py`, with Hydra's own node `hydra`."""
    cli.register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), **hydra_version_base()):
        return compose("config", return_hydra_config=True)


def record_of(config):
    """What `src/train.py` hands to a rank beside `config`, as if no override had been typed."""
    hydra_cfg = OmegaConf.create({"overrides": {"task": []}, "runtime": {"choices": {}}})
    cfg = getattr(config, "composed", None) or OmegaConf.create(asdict(config))
    return record_config(cfg, config, hydra_cfg, ["src/train.py"])


def parts_of(config):
    """What a rank gets beside them; nothing is checked."""
    strategy, sync = instantiate(config.strategy), instantiate(config.gradient_sync)
    return Parts(EnvLauncher(), instantiate(config.mode), strategy, sync)


def with_values(config, *overrides):
    """A copy of a config with other values (trainer.epochs=3)."""
    changed = config.composed.copy()
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(changed, key, yaml.safe_load(value))
    return _checked(changed)
