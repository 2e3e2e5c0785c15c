"""Small data sets in memory: digits, those that torchvision downloads, random pairs; and how image files are read."""

import gzip
import io
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.compat import decoded_jpeg
from lockstep.config.schema import Count, Seed
from lockstep.data.source import DataSource, Splits, Tensors
from lockstep.distributed.host import end_with_parent, usable_cores
from lockstep.files import one_at_a_time

LARGE_JPEG = 2**15  # bytes, from which on Pillow may be faster: it decodes a far too large image at a part of its size


@dataclass(kw_only=True)
class Digits(DataSource):
    """1437 and 360 images (N, 1, 8, 8) uint8. Their file is read as it is: to import scikit-learn takes a second."""

    def splits(self) -> Splits:
        package = Path(str(find_spec("sklearn").origin)).parent  # type: ignore[union-attr]
        with gzip.open(package / "datasets" / "data" / "digits.csv.gz") as file:
            table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
        table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
        images, targets = (table[:, :64] * 15).reshape(-1, 1, 8, 8), table[:, 64].long()  # pixels are 0 to 16 there
        return Splits(*(Tensors(images[part], targets[part]) for part in (slice(1437), slice(1437, None))))


@dataclass(kw_only=True)
class TorchvisionImages(DataSource):
    """Images (N, C, H, W) uint8 that torchvision downloads into the folder `root`."""

    name: Literal["MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100", "USPS"]
    root: str

    def prepare(self) -> None:
        with suppress(Exception):  # it is not there, or another machine writes it now
            self._split(train=False)
            return
        with one_at_a_time(Path(self.root)):
            self._split(train=False, download=True)

    def splits(self) -> Splits:
        return Splits(self._split(train=True), self._split(train=False))

    def _split(self, **options: bool) -> Tensors:
        import torchvision

        stored = getattr(torchvision.datasets, self.name)(self.root, **options)
        images = torch.as_tensor(stored.data)  # (N, H, W), or with colours (N, H, W, C)
        images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
        return Tensors(images, torch.as_tensor(stored.targets), getattr(stored, "classes", None))


@dataclass(kw_only=True)
class RandomPairs(DataSource):
    """Inputs (samples, features) and targets (samples, 1), uniform from 0 to 1, in each split."""

    samples: Count
    features: Count
    seed: Seed

    def splits(self) -> Splits:
        draws = [torch.Generator().manual_seed(2 * self.seed + number) for number in (0, 1)]
        pairs = [[torch.rand(self.samples, width, generator=draw) for width in (self.features, 1)] for draw in draws]
        return Splits(*(Tensors(inputs, targets) for inputs, targets in pairs))


def on_all_cores(function: Callable[..., Any], what: str, *columns: Sequence[Any]) -> list[Any]:
    """`function` of each row, by forks that end with this process. what: for the progress bar."""
    from tqdm import tqdm

    with ProcessPoolExecutor(len(usable_cores()), get_context("fork"), end_with_parent, (signal.SIGKILL,)) as pool:
        return list(tqdm(pool.map(function, *columns), what, len(columns[0]), disable=None))


def read_image(stored: bytes, size: int | None) -> Tensor:
    """The RGB pixels (3, H, W) uint8 of an image file, turned as its EXIF tag says. With `size`, the shorter side is
    scaled to it and the middle cut out, as by torchvision's Resize and CenterCrop. Pillow raises errors of many
    types."""
    from PIL import Image, ImageOps

    is_small_jpeg = stored[:2] == b"\xff\xd8" and (size is None or len(stored) < LARGE_JPEG)
    pixels = decoded_jpeg(stored) if is_small_jpeg else None
    if pixels is not None and len(pixels) in (1, 3):  # 4 are inks
        if size is None or pixels.shape[1:] == (size, size):
            return pixels.expand(3, -1, -1)
        found: Any = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy())
    else:
        with Image.open(io.BytesIO(stored)) as image:
            if size is not None:
                image.draft(None, (2 * size, 2 * size))  # a JPEG of four times the size is decoded at a half of its own
            found = ImageOps.exif_transpose(image)
    if found.mode == "F":
        raise ValueError("its pixels are floats; store it with 8 or 16 bits")
    if found.mode.startswith("I"):  # of 16 bits; Pillow would make all above 255 white
        found = Image.fromarray((np.asarray(found) // 256).clip(0, 255).astype(np.uint8))
    found = found.convert("RGB")
    if size is not None and found.size != (size, size):
        width, height = (size * side // min(found.size) for side in found.size)
        left, top = round((width - size) / 2), round((height - size) / 2)
        found = found.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(np.asarray(found).transpose(2, 0, 1), order="C"))
