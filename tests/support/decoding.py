"""Folders of images, and the decoded ones beside them."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from lockstep.data.images import DecodedImages, ImageFolders, Images

SIZE = 8


def save(path: Path, mode: str = "RGB", width: int = 20, height: int = 30) -> None:
    """Noise, so that every step of decoding shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(map(ord, f"{path.parent.name}{path.name}"))
    channels = len(Image.new(mode, (1, 1)).getbands())
    noise = torch.randint(0, 256, (height * width * channels,), generator=torch.Generator().manual_seed(seed))
    Image.frombytes(mode, (width, height), bytes(noise.tolist())).save(path, quality=70)


def write_pictures(folder: Path) -> Path:
    """24 training and 4 test images of two classes: JPEGs and others, of several modes and sizes. Returns `folder`."""
    for number in range(10):
        for name in ("cat", "dog"):
            save(folder / "train" / name / f"{number}.jpg", width=10 + number)
    for name, mode in {"grey.jpg": "L", "print.jpg": "CMYK", "glass.png": "RGBA", "exact.jpg": "RGB"}.items():
        exact = SIZE if name == "exact.jpg" else 30
        save(folder / "train" / "cat" / name, mode, width=exact, height=exact)
    for number in range(4):
        save(folder / "test" / "dog" / f"{number}.jpg")
    return folder


def source(root: Path, cache: Any = "auto", size: int | None = SIZE) -> ImageFolders:
    return ImageFolders(root=str(root), size=size, cache=cache, cache_dir=str(root / "decoded"))


def decode(root: Path, cache: Any = "auto", size: int | None = SIZE) -> None:
    source(root, cache, size).prepare()


def images(root: Path, cache: Any = "auto", split: str = "train", size: int | None = SIZE) -> Any:
    """Of a split that `decode` has prepared in the same way."""
    return getattr(source(root, cache, size).splits(), split)


def assert_current(root: Path) -> None:
    """The decoded images are what is read from the files now."""
    decode(root, cache=False)
    read, found = images(root, cache=False), images(root)
    assert isinstance(read, Images)
    assert isinstance(found, DecodedImages)
    assert len(found) == len(read)
    for index in range(len(read)):
        assert torch.equal(found[index][0], read[index][0])
        assert found[index][1] == read[index][1]
