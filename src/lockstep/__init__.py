"""Lockstep: distributed PyTorch training in which every rank agrees.

From Python `train` trains, `check` tests the promises for a net of yours, `load` gives what was trained, `runs` the
runs of a folder as a DataFrame, and `compose` the config of a command. Each is imported when it is asked for.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep import runs
    from lockstep.modes.trained_net import load
    from lockstep.notebook import Result, check, compose, train

__all__ = ["Result", "check", "compose", "load", "runs", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"lockstep.{ {'runs': 'runs', 'load': 'modes.trained_net'}.get(name, 'notebook') }")
    return home if name == "runs" else getattr(home, name)


def command() -> None:
    """`lockstep` in a shell: `python src/train.py`, or `python src/runs.py` if the first word is one of its verbs."""
    script = "runs.py" if {*sys.argv[1:2]} & {"table", "compare", "diff", "samples"} else "train.py"
    os.execv(sys.executable, [sys.executable, f"{os.path.dirname(os.path.dirname(__file__))}/{script}", *sys.argv[1:]])
