"""Folders of images as people have them: hidden folders, empty classes, damaged files, a test half named val."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lockstep.data.image_files import class_folders
from lockstep.data.images import ImageReader, UndecodedImages
from lockstep.data.samples import SampleError, Samples
from lockstep.errors import ConfigError


def save(path: Path, shade: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if path.suffix == ".png" else "RGB", (20, 30), shade if path.suffix == ".png" else (shade,) * 3).save(
        path
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        for name in ("cat", "dog", "ship"):
            save(tmp_path / split / name / "a.jpg")
    return tmp_path


def folder(root: Path, split: str = "train", size: int | None = 8) -> UndecodedImages:
    return UndecodedImages(class_folders(str(root), split == "train", split, None, None), size)


def test_classes_are_those_of_the_training_images_in_every_split(root: Path) -> None:
    save(root / "train" / "zebra" / "a.jpg")
    (root / "test" / "cat" / "a.jpg").unlink()
    (root / "test" / "cat").rmdir()
    test = folder(root, "test")
    assert test.classes == ["cat", "dog", "ship", "zebra"]
    assert test.targets.tolist() == [1, 2]
    (root / "test" / "dog").rename(root / "test" / "eel")
    with pytest.raises(ConfigError, match="test has a class folder eel and .*train has none"):
        folder(root, "test")


def test_hidden_folders_and_files_are_left_out_and_an_empty_class_is_named(root: Path, caplog) -> None:
    for name in (".ipynb_checkpoints/a.jpg", "cat/.hidden.jpg", "cat/.cache/a.jpg"):
        save(root / "train" / name)
    for name in ("a.JFIF", "b.jfif", "notes.txt"):
        (root / "train" / "cat" / name).touch()
    for name in ("empty", "Cat "):
        (root / "train" / name).mkdir()
    with caplog.at_level(logging.WARNING):
        train = folder(root)
    assert train.classes == ["Cat ", "cat", "dog", "empty", "ship"]
    assert train.targets.tolist() == [1, 2, 4]
    assert "train has no image of Cat , empty" in caplog.text
    assert "train: the classes 'Cat ', 'cat' differ in case or spaces alone" in caplog.text
    assert "train: left out are 2 files that end in .jfif, 1 files that end in .txt" in caplog.text


def test_images_of_any_mode_and_in_nested_folders_are_read_and_may_keep_their_size(root: Path) -> None:
    save(root / "train" / "cat" / "more" / "grey.png", shade=7)
    image, number = folder(root)[1]
    assert (image.shape, image.dtype, number) == ((3, 8, 8), torch.uint8, 0)
    assert image.unique().tolist() == [7]
    assert folder(root, size=None)[1][0].shape == (3, 30, 20)


def test_linked_folders_are_read_once(root: Path) -> None:
    save(root / "elsewhere" / "b.jpg")
    (root / "train" / "cat" / "linked").symlink_to(root / "elsewhere")
    (root / "train" / "cat" / "around").symlink_to(root / "train")
    assert [str(path.relative_to(root / "train")) for path, number in folder(root).source.files if number == 0] == [
        "cat/a.jpg",
        "cat/linked/b.jpg",
    ]


def test_the_test_images_may_lie_in_val(root: Path) -> None:
    (root / "test").rename(root / "val")
    assert len(folder(root, "val")) == 3
    with pytest.raises(ConfigError, match=r"no folder .*test; type dataset.test_split=val$"):
        folder(root, "test")


def test_a_damaged_or_deleted_file_is_named_or_skipped(root: Path) -> None:
    files = folder(root)
    cat, dog, ship = (path for path, _ in files.source.files)
    cat.write_bytes(cat.read_bytes()[:300])
    dog.unlink()
    for number, name in ((0, "cat/a.jpg"), (1, "dog/a.jpg")):
        with pytest.raises(SampleError, match=f"sample {number} of the training data .*{name}: "):
            Samples(files, "training data").__getitems__([(0, number)])
    assert ship.exists()
    skipping = Samples(files, on_error="skip").__getitems__([(0, 0), (0, 1), (0, 2)])
    assert (skipping.numbers, skipping.kept) == ([2, 2, 2], 3)


def noise(mode: str) -> Image.Image:
    """47 x 31 pixels."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    drawn = torch.randint(0, 256, (47 * 31 * channels,), generator=torch.Generator().manual_seed(1))
    return Image.frombytes(mode, (47, 31), bytes(drawn.tolist()))


def turned() -> Image.Exif:
    """What a camera writes that was held upright. Pixels are read as they are stored."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {"quality": 60, "subsampling": "4:2:0"}),
        ("RGB", {"quality": 95, "subsampling": "4:2:2", "progressive": True}),
        ("RGB", {"keep_rgb": True}),
        ("RGB", {"exif": turned()}),
        ("L", {}),
        ("CMYK", {}),
        ("YCbCr", {}),
    ],
)
@pytest.mark.parametrize("size", [None, 8])
def test_jpegs_have_the_bytes_that_pillow_and_torchvision_give(
    tmp_path: Path, mode: str, options: dict[str, Any], size: int | None
) -> None:
    from torchvision.transforms import v2

    noise(mode).save(tmp_path / "a.jpg", **options)
    fit = [] if size is None else [v2.Resize(size), v2.CenterCrop(size)]
    with Image.open(tmp_path / "a.jpg") as file:
        expected = v2.Compose([*fit, v2.PILToTensor()])(ImageOps.exif_transpose(file).convert("RGB"))
    reader = ImageReader(size)
    assert torch.equal(reader(tmp_path / "a.jpg"), expected)
    reader.decode_jpeg = None  # as with a torchvision that has it no more
    assert torch.equal(reader(tmp_path / "a.jpg"), expected)


@pytest.mark.parametrize("quality", [95, 20])  # files of 89 and of 19 kB
def test_a_photo_is_decoded_at_a_part_of_its_size(tmp_path: Path, quality: int) -> None:
    """As Pillow's draft mode does it: less than a level of 255 away from the whole, scaled. PNGs are read whole."""
    from torchvision.transforms import v2

    coarse = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    photo = Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC)
    fit = v2.Compose([v2.Resize(32), v2.CenterCrop(32), v2.PILToTensor()])
    photo.save(tmp_path / "a.png")
    photo.save(tmp_path / "a.jpg", quality=quality)
    with Image.open(tmp_path / "a.jpg") as file:
        whole = fit(file.copy())
    with Image.open(tmp_path / "a.jpg") as file:
        file.draft(None, (64, 64))
        assert file.size == (107, 80) or file.size == (160, 120)
        expected = fit(file)
    read = ImageReader(32)(tmp_path / "a.jpg")
    assert torch.equal(read, expected)
    assert not torch.equal(read, whole)
    reader = ImageReader(32)
    reader.decode_jpeg = None
    assert torch.equal(reader(tmp_path / "a.jpg"), expected)
    assert (read.int() - whole.int()).abs().double().mean() < 1
    assert torch.equal(ImageReader(32)(tmp_path / "a.png"), fit(photo))


def test_a_jpeg_that_is_cut_anywhere_is_not_read_and_one_with_another_name_is(tmp_path: Path) -> None:
    stored, path = io.BytesIO(), tmp_path / "a.jpg"
    noise("RGB").save(stored, "JPEG")
    for kept in (0, 2, 300, len(stored.getvalue()) // 2, len(stored.getvalue()) - 1):
        path.write_bytes(stored.getvalue()[:kept])
        with pytest.raises(OSError, match="a.jpg: "):
            ImageReader(None)(path)
    noise("RGB").save(path, "PNG")
    assert ImageReader(None)(path).shape == (3, 31, 47)


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_photos_are_turned_as_their_exif_tag_says(tmp_path: Path, suffix: str, tag: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = tag  # the orientation
    path = tmp_path / f"photo.{suffix}"
    noise("RGB").save(path, exif=exif)
    with Image.open(path) as stored:
        expected = ImageOps.exif_transpose(stored)
    assert torch.equal(ImageReader(None)(path), torch.from_numpy(np.array(expected)).permute(2, 0, 1))


@pytest.mark.parametrize("name", ["dark.pgm", "dark.png", "dark.tif"])
def test_dark_images_of_16_and_32_bits_stay_dark(tmp_path: Path, name: str) -> None:
    """Pillow opens the first and the last as 32 bits. The scale is one for all images."""
    kind = "int32" if name.endswith("tif") else "uint16"
    Image.fromarray(np.full((4, 4), 200, kind)).save(tmp_path / name)
    assert not ImageReader(None)(tmp_path / name).any()


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_images_of_16_bits_keep_their_upper_8_and_floats_are_refused(tmp_path: Path, name: str) -> None:
    stored = torch.arange(0, 65536, 64, dtype=torch.int32).view(32, 32)
    Image.fromarray(stored.numpy().astype("uint16")).save(tmp_path / name)
    assert torch.equal(ImageReader(None)(tmp_path / name), (stored // 256).to(torch.uint8).expand(3, -1, -1))
    Image.fromarray(stored.numpy().astype("float32")).save(tmp_path / "floats.tif")
    with pytest.raises(OSError, match=r"floats.tif: its pixels are floats, .*; store it with 8 or 16 bits"):
        ImageReader(None)(tmp_path / "floats.tif")
