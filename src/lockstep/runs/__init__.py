"""Run folders and their run.json: written, listed and compared. `lockstep.runs()` is a table of them."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Runs(ModuleType):
    """This package, which can be called: `lockstep.runs` is the package as soon as one of its modules is imported."""

    def __call__(self, *folders: str | Path) -> Any:
        """A pandas.DataFrame of the runs at or below `folders`, or below outputs: see `lockstep.runs.table.frame`."""
        from lockstep.runs.table import frame

        return frame(folders or ("outputs",))


sys.modules[__name__].__class__ = _Runs
