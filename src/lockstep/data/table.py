"""Rows of a CSV or parquet file in memory: columns of numbers, scaled, and of categories, one-hot."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Gt, Lt

from lockstep.data.source import DataSource, Splits, Tensors
from lockstep.data.split import hold_out
from lockstep.errors import ConfigError


class Rows(Tensors):
    """A split. numbers: (N, n) float64, as stored. one_hot: (N, c) bool. alike: all splits, which are scaled alike."""

    def __init__(self, alike: list["Rows"], numbers: Any, one_hot: Any, **values: Any) -> None:
        super().__init__(torch.empty(len(numbers), 0), **values)
        self.numbers, self.one_hot, self.alike = np.ma.masked_invalid(numbers), one_hot, alike
        alike.append(self)

    def fit(self, indices: Any = slice(None)) -> None:
        """Scale the numbers of all splits to mean 0 and variance 1 of these rows. What is not finite becomes 0."""
        values = self.numbers[indices]
        mean, deviation = values.mean(0).filled(0), values.std(0).filled(0)
        deviation[deviation <= 1e-12 * abs(mean)] = np.inf  # all are equal but for rounding: the column becomes 0
        for rows in self.alike:
            scaled = ((rows.numbers - mean) / deviation).filled(0)
            rows.inputs = torch.from_numpy(np.hstack([scaled, rows.one_hot]).astype(np.float32))


@dataclass(kw_only=True)
class Table(DataSource):
    """Inputs (N, numbers + categories) float32; targets (N,), numbers of the sorted classes, or (N, 1) float32.
    A category that is missing, or that no training row has, is 0 in all of its columns."""

    path: str
    separator: str
    numbers: list[str] | None
    categories: list[str]
    target: str
    labels: Literal["classes", "numbers"]
    split_column: str | None
    test: Annotated[float, Gt(0), Lt(1)]
    group_column: str | None
    weight_column: str | None

    def splits(self) -> Splits:
        import pandas as pd

        is_csv, is_class = not self.path.endswith(".parquet"), self.labels == "classes"
        frame = pd.read_csv(self.path, sep=self.separator, low_memory=False) if is_csv else pd.read_parquet(self.path)
        single = [name for name in (self.target, self.split_column, self.group_column, self.weight_column) if name]
        if lacking := [*{*single, *self.categories, *(self.numbers or ())} - {*frame}]:
            raise ValueError(f"there is no column {lacking[0]} among {', '.join(map(str, frame))}")
        if (gaps := frame[single].isna().any()).any():
            raise ValueError(f"some rows have no {gaps.idxmax()}")
        codes, names = pd.factorize(frame[self.target], sort=True)
        if is_class and names.dtype.kind == "f" and (names % 1).any():
            raise ValueError(f"{self.target} has fractions, and classes are wanted: type dataset.labels=numbers")
        targets = codes if is_class else frame[[self.target]].to_numpy(np.float32)
        values: dict[str, Any] = {"targets": torch.tensor(targets)}
        if self.group_column is not None:
            values["groups"] = frame[self.group_column].to_numpy()
        if self.weight_column is not None:
            values["weights"] = torch.tensor(frame[self.weight_column].to_numpy(np.float64))
        if self.split_column is None:
            whole = Tensors(torch.empty(len(frame)), values["targets"], groups=values.get("groups"))
            try:
                held_out = hold_out(whole, self.test, None, 0, "auto")[1]
            except ConfigError:  # whose words are of loader.validation
                raise ValueError(f"of {len(frame)} rows the share test={self.test} cannot be taken") from None
            split = np.where(np.isin(np.arange(len(frame)), held_out.indices), "test", "train")
        else:
            split = frame[self.split_column].to_numpy(str)
        if {*split} - {"val"} != {"train", "test"}:
            raise ValueError(f"rows are for {', '.join(sorted({*split})[:9])}, and must be for train, test, or val")
        one_hot = pd.get_dummies(frame[[self.target, *self.categories]], columns=self.categories).iloc[:, 1:]
        values["one_hot"] = one_hot.loc[:, one_hot[split == "train"].any()].to_numpy(bool)
        numbers = frame.drop(columns=[*single, *self.categories]) if self.numbers is None else frame[self.numbers]
        if others := [*numbers.select_dtypes(exclude=["number", "bool"])]:
            known = ",".join(numbers.columns.drop(others))
            what = f"{', '.join(others)} have values that are no numbers: correct them, or type"
            raise ValueError(f"{what} dataset.categories=[{','.join(others)}], or dataset.numbers=[{known}]")
        values["numbers"] = numbers.to_numpy(float, na_value=np.nan)
        alike, classes = list[Rows](), [*map(str, names)] if is_class else None
        for name in Splits._fields:
            Rows(alike, classes=classes, **{key: value[split == name] for key, value in values.items()})
        alike[0].fit()
        return Splits(*(rows if len(rows) else None for rows in alike))
