"""What modes write: where it may go, and what stands in it."""

from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.modes.base import require_place
from lockstep.modes.predict import table
from support.made_runs import make_run


def test_a_mode_replaces_no_file_of_a_run_and_nothing_that_is_no_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "snapshots").mkdir()
    for name in ("run.json", "model.pt", "model_best.pt", "snapshots/step_00000001", "snapshots/new.csv"):
        with pytest.raises(ConfigError, match=f"a/{name} is part of a run, .*; type mode.file=<another file>"):
            require_place(str(folder / name))
    for place in ("/dev/null", str(folder)):
        with pytest.raises(ConfigError, match="is no file that can be replaced; type mode.file=<a file that you can"):
            require_place(place)
    for allowed in (None, str(folder / "rows.csv"), str(tmp_path / "model.pt")):
        require_place(allowed)


def test_names_of_classes_stand_for_predictions_and_targets_only() -> None:
    """A column of the user's, such as the length of a text, holds numbers."""
    numbers = torch.tensor([1, 0])
    columns = {"prediction": numbers, "length": numbers, "sure": numbers == 0, "truth": numbers}
    rows = list(table(columns, ["cat", "dog"]))
    assert rows == ["index,prediction,length,sure,truth\n", "0,dog,1,False,dog\n", "1,cat,0,True,cat\n"]
    assert list(table({"prediction": numbers == 0}, ["cat", "dog"]))[1] == "0,False\n"
