"""Images in one folder per class."""

import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from lockstep.data.image_reader import ImageReader
from lockstep.errors import ConfigError

log = logging.getLogger(__name__)

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFiles:
    """`root`/<split>/<class>/**/*.jpg, or of any other type in IMAGES.

    The classes are the folders of `root`/train in alphabetical order, in every split; hidden folders are none. classes:
    how many there are; None: as many as there are folders. Raises ConfigError for a folder that is missing, and for a
    class that only another split has.
    """

    def __init__(self, root: str, split: str, classes: int | None) -> None:
        self.folder = folder = Path(root) / split
        self.classes = _class_names(Path(root) / "train")
        if classes not in (None, len(self.classes)):
            raise ConfigError(
                f"dataset.classes={classes} but {Path(root) / 'train'} has {len(self.classes)} class folders; "
                f"type dataset.classes={len(self.classes)}"
            )
        unknown = sorted(set(_class_names(folder)) - set(self.classes))
        if unknown:
            raise ConfigError(
                f"{folder} has a class folder {unknown[0]} and {Path(root) / 'train'} has none; "
                f"rename it, or type dataset.root=<folder with the same classes in train/ and {split}/>"
            )
        self.files = [(path, number) for number, name in enumerate(self.classes) for path in _images(folder / name)]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def targets(self) -> list[int]:
        """The class of each image."""
        return [number for _, number in self.files]

    def name_empty_classes(self) -> None:
        """A line in the log for classes without images."""
        empty = sorted(set(range(len(self.classes))) - set(self.targets))
        if empty:
            log.warning("%s has no image of %s", self.folder, ", ".join(self.classes[number] for number in empty))


class ImageFolder(ImageFiles, torch.utils.data.Dataset[tuple[Tensor, int]]):
    """These files, decoded each time they are read. size: as for ImageReader."""

    def __init__(self, root: str, split: str, size: int | None, classes: int | None) -> None:
        super().__init__(root, split, classes)
        self.read = ImageReader(size)
        self.name_empty_classes()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """(pixels, class). Raises OSError, with the file's name, for a file that is gone or damaged."""
        path, number = self.files[index]
        return self.read(path), number


def _class_names(folder: Path) -> list[str]:
    """The folders in `folder`, but for hidden ones such as .ipynb_checkpoints. Raises ConfigError if there are none."""
    if not folder.is_dir():
        beside = [path.name for path in folder.parent.glob("*") if path.is_dir() and path.name in ("val", "valid")]
        advice = f"dataset.test_split={beside[0]}" if beside else "dataset.root=<folder with train/ and test/ inside>"
        raise ConfigError(f"dataset=image_folder found no folder {folder.absolute()}; type {advice}")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise ConfigError(
            f"dataset=image_folder found no class folder in {folder.absolute()}; "
            f"type dataset.root=<folder with train/<class>/ and test/<class>/ inside>"
        )
    return names


def _images(folder: Path) -> list[Path]:
    """All images in `folder` and the folders in it, linked ones too, in an order that no file system changes."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(place)
        folders[:] = [name for name in folders if not name.startswith(".") and not _holds(Path(place, name), here)]
        found += [Path(place, name) for name in names if Path(name).suffix.lower() in IMAGES and name[0] != "."]
    return sorted(found)


def _holds(folder: Path, place: str) -> bool:
    """Whether `folder` is a link to a folder that `place` lies in: its files would be found again and again."""
    return folder.is_symlink() and Path(place).is_relative_to(os.path.realpath(folder))
