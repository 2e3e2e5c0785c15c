"""Lockstep: distributed PyTorch training in which every rank agrees.

From Python `train` trains, `check` tests the promises for a net of yours, `load` gives what was trained, `runs` the
runs of a folder as a DataFrame, and `compose` the config of a command. Each is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep import runs
    from lockstep.modes.trained_net import load
    from lockstep.notebook import Result, check, compose, train

__all__ = ["Result", "check", "compose", "load", "runs", "train"]


def __getattr__(name: str) -> Any:
    if name == "runs":
        return import_module("lockstep.runs")
    if name in __all__:
        return getattr(import_module("lockstep.modes.trained_net" if name == "load" else "lockstep.notebook"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
