"""Run folders and their run.json: written, listed and compared. `lockstep.runs()` is a table of them."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Runs(ModuleType):
    """This package, which can be called: `lockstep.runs` is the package as soon as one of its modules is imported."""

    def __call__(self, *folders: str | Path) -> Any:
        """A pandas.DataFrame with a row for each run at or below `folders`, or below outputs, and the columns of
        `lockstep.runs.table.Row`. Raises ConfigError for a missing folder."""
        import pandas as pd

        from lockstep.runs.table import NUMBERS, rows_of

        table = pd.DataFrame(rows_of(folders or ("outputs",)))
        return table if table.empty else table.astype(dict.fromkeys(NUMBERS, float))


sys.modules[__name__].__class__ = _Runs
