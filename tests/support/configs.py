"""Configs composed as the command line composes them."""

from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lockstep import cli
from support.commands import ROOT


def composed(*overrides: str) -> Any:
    """The config of `python src/train.py <overrides>`, with run_dir=. unless given."""
    cli.register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=["run_dir=.", *overrides])
