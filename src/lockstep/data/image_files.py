"""Which images a data set has, and the target of each: from one folder per class, or from a CSV file."""

import csv
import logging
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import Count
from lockstep.data.dataset import IGNORED
from lockstep.errors import ConfigError, first_of

log = logging.getLogger(__name__)

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
TRAIN, VALIDATION = "train", "val"

Target = int | float | list[float]
"""The number of a class; or one number, or several. -100 for a class, and NaN, say that an image has no target."""


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """The images of one half of a data set, in their order.

    folder: that their names are relative to.
    name: of this half, such as train.
    listed_in: the folder or the file that says which images these are.
    files: (path, target) of each.
    classes: their names; empty if targets are numbers.
    others: {what is left out, such as "files that end in .gif": how many}.
    groups: what each belongs to, such as a patient; None: nothing.
    """

    folder: Path
    name: str
    listed_in: Path
    files: Sequence[tuple[Path, Target]]
    classes: list[str]
    others: Mapping[str, int] = field(default_factory=dict)
    groups: list[str] | None = None

    def __len__(self) -> int:
        return len(self.files)

    @property
    def targets(self) -> Tensor:
        """(N,) int64, (N,) float64, or (N, numbers) float64."""
        return torch.from_numpy(np.array([target for _, target in self.files]))

    @cached_property
    def first_without_target(self) -> str | None:
        """The name of an image that has no target; None: all have one."""
        missing = without_target(self.targets).nonzero().flatten().tolist()
        return os.path.relpath(self.files[missing[0]][0], self.folder) if missing else None

    def name_what_is_odd(self) -> None:
        """Lines in the log for what is left out, classes without images, and classes whose names are nearly one."""
        alike: dict[str, list[str]] = {}
        for name in self.classes:
            alike.setdefault(unicodedata.normalize("NFKC", name).strip().casefold(), []).append(repr(name))
        for names in alike.values():
            if len(names) > 1:
                log.warning("%s: the classes %s differ in case or spaces alone", self.listed_in, first_of(names))
        if self.others:
            counts = [f"{count} {what}" for what, count in sorted(self.others.items())]
            log.warning("%s: left out are %s", self.listed_in, first_of(counts))
        found = {target for _, target in self.files if isinstance(target, int)}
        empty = [name for number, name in enumerate(self.classes) if number not in found]
        if empty and self.files and IGNORED not in found:
            log.warning("%s has no image of %s", self.listed_in, ", ".join(empty))


def has_validation(node: Any) -> bool:
    """Whether a node of `class_folders` or `csv_lines`, that of the test images, has images of a split `VALIDATION`
    beside them."""
    if not isinstance(node, Mapping) or node.get("test_split") in (None, VALIDATION):
        return False
    if "csv_file" not in node:
        return Path(node["root"], VALIDATION).is_dir()
    if node["test_csv_file"] or not Path(node["csv_file"]).is_file():
        return False
    column = node["split_column"]
    lines = _read_csv(Path(node["csv_file"]), None, {"split_column": [column]})
    return any(line[column] == VALIDATION for _, line in lines)


def without_target(targets: Tensor) -> Tensor:
    """Which of the targets (N,) or (N, numbers) say that an image has none: (N,) truth values."""
    missing = targets.isnan() if targets.is_floating_point() else targets == IGNORED
    return missing.any(1) if targets.dim() > 1 else missing


def class_folders(
    root: str, train: bool, test_split: str, classes: Count | None, class_names: list[str] | None
) -> ImageFiles:
    """`root`/train/<class>/**/*.jpg, or `root`/`test_split`/<class>/**/*.jpg, or images of any other type in IMAGES.

    The classes are the folders of `root`/train in alphabetical order, in every split; hidden folders are none. Where
    `class_names` says them, `root`/train may be missing, which gives no training images, and images that lie in
    `root`/`test_split` itself, without class folders, have no target. Raises ConfigError for any other folder that is
    missing, and for a class folder that is none of the classes.

    root: folder that holds train/<class>/*.jpg and test/<class>/*.jpg.
    train: whether these are the training images.
    test_split: folder in root of the test images.
    classes: folders in train/; null: as many as there are.
    class_names: names of the classes in their order; null: those of the training images, in alphabetical order.
    """
    split, of_training = TRAIN if train else test_split, Path(root) / TRAIN
    folder = Path(root) / split
    names = class_names or _class_folders(of_training)
    _require_count(classes, names, f"{of_training} has {len(names)} class folders")
    if class_names and train and not folder.is_dir():
        return ImageFiles(folder, split, folder, [], names)
    others = Counter[str]()
    if class_names and folder.is_dir() and not _folders_in(folder):
        return ImageFiles(folder, split, folder, [(path, IGNORED) for path in _images(folder, others)], names, others)
    unknown = sorted(set(_class_folders(folder)) - set(names))
    if unknown:
        raise ConfigError(
            f"{folder} has a class folder {unknown[0]} and {'the training' if class_names else of_training} has none; "
            f"rename it, or type dataset.root=<folder whose {split}/ has no other classes>"
        )
    files = [(path, number) for number, name in enumerate(names) for path in _images(folder / name, others)]
    return ImageFiles(folder, split, folder, files, names, others)


def _require_count(classes: int | None, names: Sequence[str], found: str) -> None:
    if classes not in (None, len(names)):
        raise ConfigError(f"dataset.classes={classes} but {found}; type dataset.classes={len(names)}")


def _folders_in(folder: Path) -> list[str]:
    """The names of the folders in `folder`, but for hidden ones such as .ipynb_checkpoints."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _class_folders(folder: Path) -> list[str]:
    """As `_folders_in`. Raises ConfigError if there are none."""
    if not folder.is_dir():
        beside = [path.name for path in folder.parent.glob("*") if path.is_dir() and path.name in ("val", "valid")]
        advice = f"dataset.test_split={beside[0]}" if beside else "dataset.root=<folder with train/ and test/ inside>"
        raise ConfigError(f"dataset=image_folder found no folder {folder.absolute()}; type {advice}")
    names = _folders_in(folder)
    if not names:
        raise ConfigError(
            f"dataset=image_folder found no class folder in {folder.absolute()}; "
            f"type dataset.root=<folder with train/<class>/ and test/<class>/ inside>"
        )
    return names


def _images(folder: Path, others: Counter[str]) -> list[Path]:
    """All images in `folder` and the folders in it, linked ones too, in an order that no file system changes.

    others: other files are counted here.
    """
    images: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(place)
        folders[:] = [name for name in folders if not name.startswith(".") and not _holds(Path(place, name), here)]
        for path in [Path(place, name) for name in names if name[0] != "."]:
            if path.suffix.lower() in IMAGES:
                images.append(path)
            else:
                others[f"files that end in {path.suffix.lower() or path.name}"] += 1
    return sorted(images)


def _holds(folder: Path, place: str) -> bool:
    """Whether `folder` is a link to a folder that `place` lies in: its files would be found again and again."""
    return folder.is_symlink() and Path(place).is_relative_to(os.path.realpath(folder))


def csv_lines(
    root: str,
    train: bool,
    test_split: str,
    csv_file: str,
    test_csv_file: str | None,
    file_column: str,
    suffix: str | None,
    label_columns: list[str],
    labels: Literal["classes", "numbers"],
    split_column: str,
    group_column: str | None,
    classes: Count | None,
    class_names: list[str] | None,
) -> ImageFiles:
    """The images that a CSV file lists, one on each line, in this order.

    The classes are those of the training images, in every split, in alphabetical order, or in that of their numbers if
    all are whole numbers. Where `class_names` says them, `csv_file` may be missing, which gives no training images.
    Images for tests may have no label. Raises ConfigError for a file or a column that is missing, if a split has no
    image, and for a label that cannot be.

    root: folder that the names of files are relative to.
    train: whether these are the training images.
    test_split: what split_column says of test images.
    csv_file: file with a line for each image, below one that names the columns.
    test_csv_file: such a file of the test images, so that csv_file lists training images alone; null: it lists both.
    file_column: column of the names of files.
    suffix: what these names leave out, such as .jpg; null: nothing.
    label_columns: column of the classes, or columns of numbers.
    labels: what stands there; numbers are for task=regression and, where they are 0 or 1, for task=multi_label.
    split_column: column that says train, or what test_split says; it is not read with test_csv_file.
    group_column: column that says which training images belong together, such as those of one patient: a validation set
        and a fold have all of them or none; null: each stands alone.
    classes: of the training images; null: as many as there are.
    class_names: names of the classes in their order; null: those of the training images, in alphabetical order.
    """
    if labels == "classes" and len(label_columns) != 1:
        raise ConfigError(
            f"dataset.label_columns has {len(label_columns)} columns, and a class stands in one; "
            f"type dataset.label_columns=[<column>] or dataset.labels=numbers"
        )
    split = TRAIN if train else test_split
    needed = {"file_column": [file_column], "split_column": [] if test_csv_file else [split_column]}
    of_training = needed | {"label_columns": label_columns, "group_column": [group_column] if group_column else []}
    path = Path(test_csv_file if test_csv_file and not train else csv_file)
    names = class_names or []
    if names and train and not path.exists():
        return ImageFiles(Path(root), split, path, [], names)
    if labels == "classes" and not names:
        names = _names_in_order({line[label_columns[0]] for _, line in _read_csv(Path(csv_file), TRAIN, of_training)})
        _require_count(classes, names, f"the training images in {csv_file} have {len(names)} classes")
    numbers = {"": IGNORED} | {name: number for number, name in enumerate(names)}
    files, groups = list[tuple[Path, Target]](), list[str]()
    for place, line in _read_csv(path, split, of_training if train else needed):
        if not line[file_column]:
            raise ConfigError(f"{place} says no {file_column}; write one there, or remove the line")
        texts = [line.get(column) or "" for column in label_columns]
        if train and "" in texts:
            column = label_columns[texts.index("")]
            raise ConfigError(f"{place} says no {column}; write one there, or remove the line")
        if labels == "classes" and texts[0] not in numbers:
            raise ConfigError(
                f"{place} says {label_columns[0]} {texts[0]}, and no training image does; correct it, or type "
                f"dataset.labels=numbers if labels are no classes"
            )
        values = [numbers[text] if labels == "classes" else _number(place, text) for text in texts]
        target = values[0] if len(values) == 1 else values
        files.append((Path(root, line[file_column] + (suffix or "")), target))
        groups.append(line.get(group_column or "") or "")
    others = Counter[str]()
    for column in needed["split_column"] if train else ():
        texts = [str(line[column]) for _, line in _read_csv(path, None, needed)]
        others.update(
            f"lines that say {text} as {column}" for text in texts if text not in (TRAIN, VALIDATION, test_split)
        )
    return ImageFiles(Path(root), split, path, files, names, others, groups if group_column else None)


def _names_in_order(texts: set[str]) -> list[str]:
    """In the order of their numbers, if all are whole numbers: the class 10 comes after the class 9."""
    names = sorted(texts - {""})
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def _number(place: str, text: str) -> float:
    """NaN for an empty text."""
    try:
        number = float(text or "nan")
    except ValueError:
        number = math.nan
    if text and not math.isfinite(number):
        raise ConfigError(f"{place} says {text}, and a number is wanted; correct it, or type dataset.labels=classes")
    return number


def _read_csv(path: Path, split: str | None, needed: Mapping[str, Sequence[str]]) -> list[tuple[str, dict[str, str]]]:
    """[(place for messages, {column: text})] of the lines of a split; of all lines without one, or without its column.

    needed: {key of the data set: columns}. Raises ConfigError for a column that is missing, and if there are no lines.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            lines = [(f"line {reader.line_num} of {path}", line) for line in reader]
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read ({reason}); type dataset.csv_file=<a CSV file in UTF-8>") from None
    for key, names in needed.items():
        for name in names:
            if name not in columns:
                typed = "[<name>]" if key == "label_columns" else "<name>"
                raise ConfigError(
                    f"{path} has no column {name}, but {', '.join(columns[:8]) or 'none'}; type dataset.{key}={typed}"
                )
    for column in needed["split_column"]:
        others = sorted({str(line[column]) for _, line in lines})
        lines = [found for found in lines if split in (None, found[1][column])]
        if not lines:
            raise ConfigError(
                f"no line of {path} says {split} in the column {column}, but {', '.join(others[:8]) or 'nothing'}; "
                f"type dataset.test_csv_file=<a file of the test images>, dataset.split_column=<name> or "
                f"dataset.test_split=<what {column} says of the test images>"
            )
    return lines
