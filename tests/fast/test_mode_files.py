"""What modes write: where it may go, and what stands in it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.modes.base import TrainedRun
from lockstep.modes.predict import table


def test_a_mode_replaces_nothing_that_is_no_file(tmp_path: Path) -> None:
    trained: Any = SimpleNamespace(folder=tmp_path)
    for place in ("/dev/null", str(tmp_path)):
        with pytest.raises(ConfigError, match="is no file.*; type mode.file=<a file that you can"):
            TrainedRun.output(trained, place, "rows.csv")
    assert TrainedRun.output(trained, str(tmp_path / "new" / "rows.csv"), "") == tmp_path / "new" / "rows.csv"
    assert (tmp_path / "new").is_dir()


def test_names_of_classes_stand_for_predictions_and_targets_only() -> None:
    """A column of the user's, such as the length of a text, holds numbers."""
    numbers = torch.tensor([1, 0])
    columns = {"prediction": numbers, "length": numbers, "sure": numbers == 0, "truth": torch.tensor([1, -100])}
    rows = table(columns, ["cat", "dog"]).to_csv()
    assert rows == ",prediction,length,sure,truth\n0,dog,1,False,dog\n1,cat,0,True,\n"
    wide = {"prediction": numbers == 0, "probability": torch.full((2, 2), 0.1, dtype=torch.bfloat16)}
    assert table(wide, ["cat", "dog"]).to_csv().splitlines()[:2] == [
        ",prediction,probability_cat,probability_dog",
        "0,False,0.100097656,0.100097656",
    ]
