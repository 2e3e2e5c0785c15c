"""Images in one folder per class."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError


class ImageFolder(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """`root`/train/<class>/*.jpg and `root`/test/<class>/*.jpg as uint8 images (3, size, size), read by torchvision.

    Raises ConfigError if the folder is missing or has another number of classes than `classes` says.
    """

    def __init__(self, root: str, size: int, classes: int, train: bool) -> None:
        from torchvision.datasets import ImageFolder as TorchvisionImageFolder
        from torchvision.transforms import v2

        folder = Path(root) / ("train" if train else "test")
        if not folder.is_dir():
            raise ConfigError(
                f"dataset=image_folder found no folder {folder.absolute()}; "
                f"type dataset.root=<folder with train/ and test/ inside>"
            )
        transform = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()])
        try:
            self.files: Any = TorchvisionImageFolder(folder, transform)
        except FileNotFoundError as error:  # no class folder, or one without images
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"dataset=image_folder cannot read {folder.absolute()} ({reason}); "
                f"type dataset.root=<folder with train/<class>/ and test/<class>/ inside>"
            ) from None
        found = len(self.files.classes)
        if found != classes:
            raise ConfigError(
                f"dataset.classes={classes} but {folder} has {found} class folders; type dataset.classes={found}"
            )

        self.classes: list[str] = self.files.classes

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample: tuple[Tensor, int] = self.files[index]
        return sample
