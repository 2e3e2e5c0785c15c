"""Tables: which rows tell how numbers are scaled and what categories there are."""

import numpy as np
import pandas as pd
import pytest
from sklearn.preprocessing import StandardScaler

from lockstep.data.split import hold_out
from lockstep.data.table import Table

KEYS = dict(separator=",", numbers=["a"], categories=["c"], target="y", labels="classes", split_column="s", test=0.25)
KEYS |= dict(group_column="g", weight_column=None)


def test_rows_that_are_trained_on_alone_tell_the_scale(tmp_path):
    frame = pd.DataFrame({"a": np.random.default_rng(0).normal(5, 2, 80), "c": ["x", "y", None, "z"] * 20})
    frame["y"], frame["s"], frame["g"] = [10, 9] * 40, ["train", "train", "val", "test"] * 20, np.arange(80) // 4
    frame.loc[::7, "a"] = np.nan
    frame.to_csv(path := str(tmp_path / "rows.csv"))
    splits = Table(path=path, **KEYS).splits()
    scaler = StandardScaler().fit(frame[["a"]][frame.s == "train"])
    values = np.nan_to_num(scaler.transform(frame[["a"]][frame.s == "test"]))
    assert np.allclose(splits.test.inputs, np.hstack([values, np.zeros((20, 2))]), atol=1e-6)  # z is not in training
    assert splits.train.inputs[:2, 1:].tolist() == [[1, 0], [0, 1]]
    assert [splits.train.classes[target] for target in splits.train.targets[:2]] == ["10", "9"]
    held = hold_out(splits.train, 0.25, None, 0, True)[0].indices
    values = scaler.fit(frame[["a"]][frame.s == "train"].iloc[held]).transform(frame[["a"]][frame.s == "train"])
    assert np.allclose(splits.train.inputs[:, :1], np.nan_to_num(values), atol=1e-6)
    with pytest.raises(ValueError, match="no a"):
        Table(path=path, **KEYS | {"target": "a"}).splits()
