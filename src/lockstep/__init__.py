"""Lockstep: distributed PyTorch training in which every rank agrees.

`train` trains, `check` tests its promises, `load` gives the net, `table` the runs, and `compose` a config.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.modes.trained_net import load
    from lockstep.notebook import Result, check, compose, table, train

__all__ = ["Result", "check", "compose", "load", "table", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lockstep.modes.trained_net" if name == "load" else "lockstep.notebook"), name)
