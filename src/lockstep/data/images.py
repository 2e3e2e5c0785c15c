"""Images in folders, or listed in a CSV file. `prepare` writes their names into a file, and the pixels of images of one
size into another. Ranks map both into memory, and walk through no folder."""

import io
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import Count
from lockstep.data.source import DataSource, Splits, Tensors
from lockstep.data.vision import on_all_cores, read_image
from lockstep.errors import ConfigError, first_line
from lockstep.files import one_at_a_time, short_hash, write_whole

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
LARGEST = 16e9  # bytes of the pixels of a split that cache=auto keeps


def read_file(path: str, size: int | None) -> Tensor:
    """As `read_image`. Raises OSError with the file's name: Pillow raises several types, and not all have it."""
    try:
        with open(path, "rb", buffering=0) as file:
            return read_image(file.read(), size)
    except Exception as error:
        raise OSError(f"{path}: {first_line(error)}") from error


@dataclass(eq=False)
class Images(torch.utils.data.Dataset[Any]):
    """The images of a split, decoded when they are read. files: (N,) bytes, below `root`. targets: None without labels;
    those of samples are then torch's ignore_index."""

    root: str
    size: int | None
    files: Any
    targets: Tensor | None
    classes: Any = None
    groups: Any = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image = read_file(os.path.join(self.root, os.fsdecode(self.files[index])), self.size)
        if self.targets is None:
            return image, -100
        return image, self.targets[index].clone() if self.targets.dim() > 1 else self.targets[index].item()


@dataclass(kw_only=True)
class ImageSource(DataSource):
    """Images in the folder `root`. A subclass says which: it has `listed`."""

    root: str
    size: Count | None
    cache: Literal["auto"] | bool
    cache_dir: str

    def listed(self) -> dict[str, dict[str, Any]]:
        """What `columns` makes of train, test and perhaps val."""
        raise NotImplementedError

    def columns(self, source: str, names: list[str], targets: Any, **others: Any) -> dict[str, Any]:
        """Of a split, whose name `source` is. names: of the files, relative to the root. others: as of `Tensors`."""
        if not names:
            raise ConfigError(f"{source} has no images; type dataset.root=<folder with {', '.join(ENDINGS)}>")
        stored = np.array([os.fsencode(name) for name in names]).view(np.uint8).reshape(len(names), -1)
        return {"files": torch.from_numpy(stored), "targets": targets, **others}

    def prepare(self) -> None:
        found, stored = self.listed(), io.BytesIO()
        with one_at_a_time(Path(self.cache_dir)):
            for columns in found.values():  # images without labels are read once
                columns["pixels"] = None if columns["targets"] is None else self._pixels(_names(columns["files"]))
            torch.save(found, stored)
            # Not without need: another machine may have the file mapped, and NFS would end its ranks.
            if not self._list().exists() or self._list().read_bytes() != stored.getvalue():
                write_whole(self._list(), stored.getvalue())

    def splits(self) -> Splits:
        found = torch.load(self._list(), mmap=True, weights_only=True)
        return Splits(**{name: self._split(**columns) for name, columns in found.items()})

    def _split(self, pixels: str | None, files: Tensor, **columns: Any) -> Images | Tensors:
        if pixels is None:
            return Images(self.root, self.size, _names(files), **columns)
        decoded = np.load(Path(self.cache_dir, pixels), mmap_mode="c")
        return Tensors(torch.from_numpy(decoded), files=_names(files), **columns)

    def _list(self) -> Path:
        return Path(self.cache_dir, f"{short_hash(type(self), os.getcwd(), vars(self))}.list")

    def _pixels(self, names: Any) -> str | None:
        """The name of a file with the pixels of these images, made if it is not there; None if they are not kept."""
        from PIL import __version__

        size, limit = self.size, {"auto": LARGEST, True: float("inf"), False: 0}[self.cache]
        if size is None or len(names) * 3 * size**2 > limit:
            return None
        paths = [os.path.join(self.root, os.fsdecode(name)) for name in names]
        # Two files that are renamed to each other's name differ in st_ctime alone.
        states = np.array([(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in map(os.stat, paths)])
        about = (__version__, size, len(names), names.tobytes(), states.tobytes())
        path = Path(self.cache_dir, f"{short_hash(*about)}.npy")
        if not path.exists():
            temporary = path.with_name("unfinished.npy")  # the next process writes over what a killed one left
            np.lib.format.open_memmap(temporary, "w+", np.uint8, (len(names), 3, size, size))
            parts = range(0, len(paths), 64)
            read_file(paths[0], size)  # imports what decodes, before the forks
            pieces = [paths[at : at + 64] for at in parts]
            on_all_cores(partial(_decode, temporary, size), f"decoding {self.root} once", parts, pieces)
            os.replace(temporary, path)
        return path.name


def _names(files: Tensor) -> Any:
    return files.numpy().view(f"S{files.shape[1]}")[:, 0]


def _decode(file: Path, size: int, start: int, paths: list[str]) -> None:
    pixels = np.load(file, mmap_mode="r+")
    for row, path in enumerate(paths, start):
        pixels[row] = read_file(path, size).numpy()
    pixels.flush()


@dataclass(kw_only=True)
class ImageFolders(ImageSource):
    """`root`/train/<class>/**/*.jpg, `root`/test/<class>/**/*.jpg and perhaps `root`/val/, with any of ENDINGS."""

    def listed(self) -> dict[str, dict[str, Any]]:
        found, classes = dict[str, dict[str, Any]](), list[str]()
        for split in ["train", "test", "val"] if Path(self.root, "val").is_dir() else ["train", "test"]:
            folder = Path(self.root, split)
            own = sorted(place.name for place in folder.glob("[!.]*/"))
            classes = classes or own  # of training; `require_same_classes` refuses other ones by their names
            names = classes + [name for name in own if name not in classes]
            pairs = [(file, number) for number, name in enumerate(names) for file in _below(folder / name, self.root)]
            files, targets = [file for file, _ in pairs], torch.tensor([number for _, number in pairs])
            found[split] = self.columns(f"{folder}/<class>/", files, targets, classes=names)
        return found


@dataclass(kw_only=True)
class ImageList(ImageSource):
    """Images without labels, for mode=predict: all in the folder `root`. Both splits have them."""

    def listed(self) -> dict[str, dict[str, Any]]:
        columns = self.columns(self.root, _below(Path(self.root), self.root), None)
        return {"train": columns, "test": columns.copy()}


def _below(folder: Path, root: str) -> list[str]:
    """The images in `folder` and in folders in it, relative to `root`, sorted; but what is hidden."""
    found = list[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "."]
        here = os.path.relpath(os.path.join(place, "x"), root)[:-1]
        found += [here + name for name in names if name[0] != "." and name.lower().endswith(ENDINGS)]
    return sorted(found)


@dataclass(kw_only=True)
class CsvImages(ImageSource):
    """Images that a CSV file lists, one in each row: its name relative to `root`, its labels, and its split."""

    csv_file: str
    file_column: str
    label_columns: list[str]
    labels: Literal["classes", "numbers"]
    split_column: str
    group_column: str | None

    def listed(self) -> dict[str, dict[str, Any]]:
        import pandas as pd

        def require(holds: Any, what: str) -> None:
            if not holds.all():
                raise ValueError(f"row {holds.argmin() + 1} of {self.csv_file} {what}")

        texts = [self.file_column, self.split_column]
        used = {*texts, *self.label_columns, self.group_column or self.file_column}
        options: Any = {"usecols": used, "dtype": dict.fromkeys(texts, str), "na_values": [""]}
        frame = pd.read_csv(self.csv_file, keep_default_na=False, low_memory=False, **options)
        files, split, labels = frame[self.file_column], frame[self.split_column], frame[self.label_columns].squeeze(1)
        require(frame.notna().all(axis=1), "has no value in a column")
        require(split.isin(Splits._fields), "says neither train, val nor test")
        require(split.groupby(files).transform("nunique") == 1, "has a file that another split has, too")
        classes, values = self.label_columns, dict[str, Any]()
        if self.labels == "numbers":
            values["targets"] = labels.to_numpy(np.float64)
        elif len(classes) != 1:
            raise ValueError("a class stands in one of label_columns")
        else:
            names = np.unique(labels[split == "train"])
            require(labels.isin(names), "has a class that no training image has")
            classes, values["targets"] = [str(name) for name in names], np.searchsorted(names, labels)
        if self.group_column is not None:
            values["groups"] = pd.factorize(frame[self.group_column])[0]
        found = {}
        for name in ["train", "test", "val"] if (split == "val").any() else ["train", "test"]:
            rows = np.flatnonzero(split == name)
            own = {key: torch.from_numpy(value[rows]) for key, value in values.items()}
            found[name] = self.columns(f"{self.csv_file}, {name},", files[rows].tolist(), classes=classes, **own)
        return found
