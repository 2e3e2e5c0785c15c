"""Every data set that conf/ reads from a disk, in its own file format, with a few samples of noise."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np

TRAIN, TEST = 96, 40  # samples, of images that are stored in one file
SYMBOLS = 65  # different ones in the text, as in tinyshakespeare
_noise = np.random.default_rng(0)


def write_small_data(folder: Path) -> Path:
    """Write MNIST, FashionMNIST, CIFAR10, folders of images and a text for `data_dir=folder`. Returns `folder`."""
    for name in ("MNIST", "FashionMNIST"):
        write_idx(folder / name / "raw", TRAIN, TEST)
    _write_cifar10(folder / "cifar-10-batches-py")
    _write_images(folder)
    _write_text(folder / "tinyshakespeare")
    return folder


def write_idx(raw: Path, train: int, test: int) -> None:
    """The four files of MNIST with so many images of noise."""
    raw.mkdir(parents=True)
    for split, count in (("train", train), ("t10k", test)):
        for kind, values in (("images", _pixels(count, 28, 28)), ("labels", _classes(count))):
            header = np.array([0x800 + values.ndim, *values.shape], dtype=">i4").tobytes()
            (raw / f"{split}-{kind}-idx{values.ndim}-ubyte").write_bytes(header + values.tobytes())


def _write_cifar10(folder: Path) -> None:
    folder.mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        batch = {"data": _pixels(20, 3072), "labels": _classes(20).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    names = {"label_names": [str(number) for number in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))


def _write_images(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    for split, count in (("train", 12), ("test", 4)):
        for name in ("cat", "dog"):
            of_class = folder / split / name
            of_class.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(_pixels(40, 48, 3)).save(of_class / f"{number}.jpg")
        with tarfile.open(folder / f"{split}0.tar", "w") as tar:  # as webdataset writes it
            for number, image in enumerate(sorted(folder.glob(f"{split}/*/*.jpg"))):
                tar.add(image, f"{number}.jpg")
                target = tarfile.TarInfo(f"{number}.cls")
                target.size = 1
                tar.addfile(target, io.BytesIO(str(number % 2).encode()))
        images = [{"bytes": file.read_bytes()} for file in sorted(folder.glob(f"{split}/*/*.jpg"))]
        table = pyarrow.table({"image": images, "label": [0, 1] * (len(images) // 2)})
        pyarrow.parquet.write_table(table, folder / f"{split}-0.parquet")
        (folder / f"{split}0.jsonl").write_text('{"text": "one document of a few words"}\n' * 200)
    files = sorted(folder.glob("t*/*/*.jpg"))
    lines = [f"{file.relative_to(folder)},{file.parent.name},{file.parent.parent.name}\n" for file in files]
    (folder / "labels.csv").write_text("file,label,split\n" + "".join(lines))


def _write_text(folder: Path) -> None:
    folder.mkdir()
    symbols = "".join(map(chr, range(32, 32 + SYMBOLS)))
    (folder / "input.txt").write_text(symbols * 200)


def _pixels(*shape: int) -> np.ndarray:
    return _noise.integers(0, 256, shape, dtype=np.uint8)


def _classes(count: int) -> np.ndarray:
    return (np.arange(count) % 10).astype(np.uint8)
