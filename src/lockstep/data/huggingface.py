"""Data sets of Hugging Face's `datasets`: parquet, Arrow, JSON lines or CSV files, mapped into memory as Arrow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep.config.schema import Count
from lockstep.data.source import DataSource, Splits
from lockstep.data.vision import read_image
from lockstep.errors import ConfigError


class Columns(Dataset[tuple[Any, Any]]):
    """rows: a `datasets.Dataset`. names: of its columns for inputs and targets. The attribute `targets` is a column of
    numbers, `classes` the names of a ClassLabel."""

    def __init__(self, rows: Any, names: tuple[str, str], size: int | None) -> None:
        import datasets  # type: ignore[import-untyped]

        self.names, self.size = names, size
        self.rows = rows.select_columns(sorted({*names}))
        for name, feature in self.rows.features.items():
            if isinstance(feature, datasets.Image):  # `read_image` gives RGB of any file, and uses its size
                self.rows = self.rows.cast_column(name, datasets.Image(decode=False))
        feature = rows.features[names[1]]
        is_number = getattr(feature, "dtype", "").startswith(("int", "uint", "float"))
        self.targets = None
        if is_number:  # writable, as torch wants arrays
            self.targets = np.require(self.rows.with_format("arrow")[:][names[1]].to_numpy(), requirements="W")
        self.classes = getattr(feature, "names", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        found = self.rows[int(index)]
        for name, value in found.items():
            if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
                found[name] = read_image(value["bytes"] or Path(value["path"]).read_bytes(), self.size)
            elif isinstance(value, list):
                found[name] = torch.tensor(value)
        return tuple(found[name] for name in self.names)


@dataclass(kw_only=True)
class HuggingFace(DataSource):
    """path: a folder, as `hf download` or `save_to_disk` writes it. inputs, targets: as the names of `Columns`."""

    path: str
    train_split: str
    test_split: str
    val_split: str | None
    inputs: str
    targets: str
    size: Count | None

    def prepare(self) -> None:
        self.splits()  # the first time, `datasets` writes its own files, under a lock

    def splits(self) -> Splits:
        import datasets

        if not Path(self.path).is_dir():  # `datasets` would look for this name on the Hub
            advice = "type hf download <name> --repo-type dataset --local-dir <folder>, and dataset.path=<folder>"
            raise ConfigError(f"{self.path} is no folder, and nothing is downloaded; {advice}")
        names = [name for name in (self.train_split, self.test_split, self.val_split) if name is not None]
        saved = datasets.load_from_disk(self.path) if Path(self.path, "dataset_dict.json").exists() else None
        found = [saved[name] for name in names] if saved else datasets.load_dataset(self.path, split=names)
        return Splits(*(Columns(rows, (self.inputs, self.targets), self.size) for rows in found))
