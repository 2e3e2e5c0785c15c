"""Images: their pixels, which there are, and what is kept of them."""

import os
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

from lockstep.data.images import CsvImages, ImageFolders, ImageList
from lockstep.data.source import class_count, class_names
from lockstep.data.vision import read_image

PIXELS = np.random.default_rng(0).integers(0, 256, (30, 41, 3), dtype=np.uint8)
COLUMNS = dict(file_column="file", label_columns=["label"], labels="classes", split_column="split", group_column=None)


@pytest.fixture
def tree(tmp_path):
    for number, name in enumerate(["train/b/x.PNG", "train/a/deep/y.png", "train/a/z.png", "test/b/t.png"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS + np.uint8(number)).save(tmp_path / name, format="bmp")  # all have the same size
    for hidden in ("train/.ck/n.png", "train/a/._z.png"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).touch()
    return tmp_path


def splits_of(kind, tree, **keys):
    source = kind(**dict(root=str(tree), size=8, cache="auto", cache_dir=str(tree / "kept")) | keys)
    source.prepare()
    return source.splits()


def test_pixels_are_those_of_torchvision_and_16_bits_have_one_scale(tmp_path):
    endings = {"RGB": "jpg", "L": "JPG", "CMYK": "jpeg", "P": "png"}
    for mode, turn, size in product(endings, (1, 3, 6), (None, 24, 30, 64)):
        path, exif = tmp_path / f"x.{endings[mode]}", Image.Exif()
        exif[0x0112] = turn
        Image.fromarray(PIXELS).convert(mode).save(path, exif=exif.tobytes())
        image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        plain = image if size is None else v2.Compose([v2.Resize(size), v2.CenterCrop(size)])(image)
        assert torch.equal(read_image(path.read_bytes(), size), v2.functional.pil_to_tensor(plain)), (mode, turn, size)
    for brightest in (255, 65535):
        Image.fromarray(np.array([[0, brightest]], dtype=np.uint16)).save(tmp_path / "x.png")
        assert read_image((tmp_path / "x.png").read_bytes(), None)[0].tolist() == [[0, brightest // 256]]


@pytest.mark.parametrize("cache", [False, True])
def test_folders_are_numbered_by_the_training_classes_and_a_list_has_no_labels(tree, cache):
    images = splits_of(ImageList, tree / "train").test
    assert (images.files.tolist()[0], images[2][1], class_names(images)) == (b"a/deep/y.png", -100, [])
    assert class_count(images, -100) is None
    splits = splits_of(ImageFolders, tree, cache=cache)
    assert splits.train.files.tolist() == [b"train/a/deep/y.png", b"train/a/z.png", b"train/b/x.PNG"]
    assert (splits.train.classes, splits.train.targets.tolist()) == (["a", "b"], [0, 0, 1])
    assert (splits.test.targets.tolist(), splits.val) == ([1], None)
    assert torch.equal(splits.test[0][0], read_image((tree / "test/b/t.png").read_bytes(), 8))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("kind", [ImageFolders, CsvImages])
def test_ranks_look_at_no_image_and_no_csv_file(tree, kind, cache):
    (tree / "x.csv").write_text("file,label,split\ntrain/a/z.png,a,train\ntest/b/t.png,a,test\n")
    keys = dict(csv_file=str(tree / "x.csv")) | COLUMNS if kind is CsvImages else {}
    source = kind(root=str(tree), size=8, cache=cache, cache_dir=str(tree / "kept"), **keys)
    source.prepare()
    for name in ("train", "test", "x.csv"):
        (tree / name).rename(tree / f"gone {name}")
    assert len(source.splits().test) == 1


def test_what_is_kept_follows_the_files(tree):
    before, paths = splits_of(ImageFolders, tree), [tree / "train/a/z.png", tree / "train/b/x.PNG"]
    for path in paths:
        os.utime(path, (1, 1))
    for old, new in zip([paths[0], paths[1], tree / "t"], [tree / "t", *paths], strict=True):
        old.rename(new)
    after = splits_of(ImageFolders, tree)
    assert torch.equal(after.train.inputs[[0, 2, 1]], before.train.inputs)
    paths[0].write_bytes(b"no image")
    with pytest.raises(OSError, match="z.png: "):
        splits_of(ImageFolders, tree)
    with pytest.raises(OSError, match="z.png"):
        splits_of(ImageFolders, tree, cache=False).train[1]


def test_csv_files(tree):
    rows = "train/a/z.png,10,train,p,1\ntrain/b/x.PNG,9,train,p,2\ntest/b/t.png,10,test,q,1\n"
    (tree / "x.csv").write_text(f"file,label,split,g,w\n{rows}")
    keys = COLUMNS | dict(csv_file=str(tree / "x.csv"))
    train, test, val = splits_of(CsvImages, tree, **keys | dict(group_column="g"))
    assert (train.classes, train.targets.tolist(), test.targets.tolist(), val) == (["9", "10"], [1, 0], [1], None)
    assert train.groups.tolist() == [0, 0]
    train = splits_of(CsvImages, tree, **keys | dict(labels="numbers", label_columns=["label", "w"])).train
    assert train.targets.tolist() == [[10, 1], [9, 2]]


WRONG = {
    "a,1,train\nb,2,test": "row 2 .* no training image",
    "a,1,train\na,1,test": "row 1 .* another split",
    "a,1,train\nb,1,Test": "row 2 .* neither train",
    "a,1,train\nb,,test": "row 2 .* no value",
}


def test_wrong_rows_are_refused(tree):
    for rows, said in WRONG.items():
        (tree / "x.csv").write_text(f"file,label,split\n{rows}\n")
        with pytest.raises(ValueError, match=said):
            splits_of(CsvImages, tree, **COLUMNS, csv_file=str(tree / "x.csv"))
