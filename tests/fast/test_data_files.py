"""Data in files: images, text, tars, tables and Hugging Face's, and what is kept of them."""

import gzip
import io
import os
import re
import tarfile
from contextlib import suppress
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.preprocessing import StandardScaler
from torchvision.transforms import v2

from lockstep.data.build import prepare_first
from lockstep.data.source import class_count, class_names
from lockstep.data.split import hold_out
from lockstep.data.vision import read_image
from lockstep.errors import ConfigError
from support.configs import composed

# Extras, each of which a fork may have deleted with its tests.
with suppress(ImportError):
    from lockstep.data.huggingface import HuggingFace
with suppress(ImportError):
    from lockstep.data.images import CsvImages, ImageFolders, ImageList
with suppress(ImportError):
    from lockstep.data.table import Table
with suppress(ImportError):
    from lockstep.data.tar_shards import TarShards
with suppress(ImportError):
    from lockstep.data.text import Text, Windows

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
    splits = splits_of(ImageFolders, tree, cache=cache)
    assert splits.train.files.tolist() == [b"train/a/deep/y.png", b"train/a/z.png", b"train/b/x.PNG"]
    assert (splits.train.classes, splits.train.targets.tolist()) == (["a", "b"], [0, 0, 1])
    assert (splits.test.targets.tolist(), splits.val) == ([1], None)
    assert torch.equal(splits.test[0][0], read_image((tree / "test/b/t.png").read_bytes(), 8))
    images = splits_of(ImageList, tree / "train").test
    assert (images.files.tolist()[0], images[2][1], class_names(images)) == (b"a/deep/y.png", -100, [])
    assert class_count(images, -100) is None


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("kind", ["ImageFolders", "CsvImages"])
def test_ranks_look_at_no_image_and_no_csv_file(tree, kind, cache):
    (tree / "x.csv").write_text("file,label,split\ntrain/a/z.png,a,train\ntest/b/t.png,a,test\n")
    keys = dict(csv_file=str(tree / "x.csv")) | COLUMNS if kind == "CsvImages" else {}
    source = globals()[kind](root=str(tree), size=8, cache=cache, cache_dir=str(tree / "kept"), **keys)
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


WORDS = "the quick brown añ ☃\r\n fox " * 9


def coder(data):
    from lockstep.data.text import Tokenizer

    return Tokenizer(data.tokenizer, data.classes)


def text(folder, **values):
    (folder / "text.txt").write_bytes(WORDS.encode())
    usual = {"path": str(folder / "text.txt"), "test_path": None, "tokenizer": "characters"}
    usual |= {"block": 4, "stride": 1, "samples": None, "tokens_dir": str(folder / "tokens")}
    return Text(**usual | values)


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_a_text_becomes_numbers_and_every_token_of_the_tests_is_a_target_once(tmp_path, tokenizer):
    source = text(tmp_path, tokenizer=tokenizer)
    source.prepare()
    train, test, _ = source.splits()
    written = torch.cat([train.tokens, test.tokens])
    assert coder(train).decode(written.tolist()) == WORDS
    assert len(train.tokens) == int(0.9 * len(written))
    assert (len(train), train.draws) == (len(train.tokens) - 4, (len(train.tokens) - 1) // 4)
    assert class_count(train, train[0][1]) == (len(set(WORDS)) if tokenizer == "characters" else 256)
    whole = train.tokens.long()
    inputs, targets = train.gather(torch.arange(len(train)))
    assert torch.equal(inputs, whole[:-1].unfold(0, 4, 1))
    assert torch.equal(targets, whole[1:].unfold(0, 4, 1))
    targets = test.gather(torch.arange(len(test)))[1]
    assert targets[targets != -100].tolist() == test.tokens[1:].tolist()


def test_no_training_window_touches_what_is_held_out():
    whole = Windows(torch.arange(100).to(torch.uint16), 4, 1, None, "bytes", [], [(0, 100)])
    for size, fold in ((0.2, None), (5, None), (None, (0, 3)), (None, (1, 3)), (None, (2, 3))):
        train, val = whole.hold_out(size, fold, seed=0)
        inputs, targets = train.gather(torch.arange(len(train)))
        held_out, used = {*range(*val.pieces[0])}, {*inputs.flatten().tolist(), *targets.flatten().tolist()}
        assert used == {*range(100)} - held_out
        found = val.gather(torch.arange(len(val)))[1]
        assert found[found != -100].tolist() == sorted(held_out)[1:]


def test_texts_of_several_files_are_read_one_after_the_other_and_again_when_one_changes(tmp_path):
    with gzip.open(tmp_path / "train-0.txt.gz", "wt") as file:
        file.write("zipped ")
    (tmp_path / "train-1.txt").write_text("plain\ntext")
    source = text(tmp_path, path=f"{tmp_path}/train*", test_path=[f"{tmp_path}/train-1.txt"], tokenizer="bytes")
    for _ in range(2):
        source.prepare()
        assert coder(source.splits().train).decode(source.splits().train.tokens.tolist()) == "zipped plain\ntext"
    (tmp_path / "train-1.txt").write_text("another")
    source.prepare()
    assert coder(source.splits().test).decode(source.splits().test.tokens.tolist()) == "another"


def test_a_file_of_tokens_is_read_as_it_is(tmp_path):
    (torch.arange(100) * 3).to(torch.uint16).numpy().tofile(path := tmp_path / "train.bin")
    for classes in (None, 300):
        source = text(tmp_path, path=str(path), tokenizer="uint16", classes=classes)
        source.prepare()
        train, test, _ = source.splits()
        assert (train.tokens.tolist(), test.tokens.tolist()) == ([*range(0, 270, 3)], [*range(270, 300, 3)])
        assert class_count(train, train[0][1]) == (classes or 2**16)
    assert coder(train).decode(coder(train).encode("3 299")) == "3 299"


def test_a_rank_holds_no_text(tmp_path):
    def own_bytes():
        return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024

    (tmp_path / "long.txt").write_text(WORDS * 10**5)
    source = text(tmp_path, path=str(tmp_path / "long.txt"))
    source.prepare()
    before = own_bytes()
    train = source.splits().train
    train.gather(torch.arange(0, len(train), 9999))
    assert own_bytes() - before < len(train) / 10


def test_what_cannot_be_used_is_refused_with_what_to_type(tmp_path):
    (tmp_path / "picture").write_bytes(b"\xff\xd8" * 9)
    source = text(tmp_path)
    source.prepare()
    with pytest.raises(ConfigError, match="the text has no 'z'.*; type mode.prompt="):
        coder(source.splits().train).encode("fuzzy")
    for words, said in [
        ([f"dataset.path={tmp_path}/none.txt"], "FileNotFoundError: .*none.txt.*; correct what it names, or type "),
        ([f"dataset.path={tmp_path}/none*"], "no text is in .*none.*; correct what it names, or type "),
        ([f"dataset.path={tmp_path}/picture"], "UnicodeDecodeError: .*; correct what it names, or type "),
    ]:
        with pytest.raises(ConfigError, match=said):
            prepare_first(composed("dataset=text", f"dataset.tokens_dir={tmp_path}", *words))


TARS, SAMPLES = 40, 5


def add(file, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    file.addfile(info, io.BytesIO(content))


@pytest.fixture
def keys(tmp_path):
    for tar in range(TARS + 1):
        with tarfile.open(tmp_path / f"part-{tar:02}.tar", "w", format=tar % 3) as file:
            for number in range(tar * SAMPLES, (tar + 1) * SAMPLES):
                name = f"./{'long' * (30 if tar % 3 else 1)}.d/{number}"
                add(file, f"{name}.TXT", b"text %d" % number)
                add(file, f"{name}.cls", b"%d\n" % (number % 7))
                add(file, f"{name}.json", b"{}")
    urls = {"urls": f"{tmp_path}/part-[0-3]*.tar", "test_urls": f"{tmp_path}/part-{TARS}*.tar"}
    return urls | dict(val_urls=None, inputs="txt", targets="cls", size=None, index_dir=f"{tmp_path}/indexes")


def read_all(dataset):
    before = len(os.listdir("/proc/self/fd"))
    assert [dataset[number] for number in range(len(dataset))] == [(f"text {n}", n % 7) for n in range(len(dataset))]
    assert len(os.listdir("/proc/self/fd")) <= before + 32


def test_samples_are_read_by_number_before_and_after_a_fork(keys):
    TarShards(**keys).prepare()
    train = TarShards(**keys).splits().train
    assert train.targets.tolist() == [number % 7 for number in range(TARS * SAMPLES)]
    assert train.shards.tolist() == [number // SAMPLES for number in range(TARS * SAMPLES)]
    read_all(train)
    ranks = [get_context("fork").Process(target=read_all, args=(train,)) for _ in range(2)]
    [process.start() for process in ranks]
    read_all(train)
    assert [process.join() or process.exitcode for process in ranks] == [0, 0]


def test_a_tar_that_is_cut_is_named(keys, tmp_path):
    TarShards(**keys).prepare()
    for cut in (7168, 5000, 512):
        os.truncate(tmp_path / "part-03.tar", cut)
        with pytest.raises(ValueError, match=r"part-03.tar: "):
            TarShards(**keys).prepare()


OF_ROWS = dict(train_split="train", test_split="test", val_split=None, targets="label", size=2)


def test_columns_of_files_of_any_kind_are_samples(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 2, 3), dtype=np.uint8)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    images = datasets.Dataset.from_dict({"image": [*map(Image.fromarray, pixels)], "label": [1, 0]}, features=kinds)
    rows = datasets.Dataset.from_dict({"x": [0.5, 1.5, 2.5], "y": [1, 2, 3], "label": [2, 0, 1]})
    datasets.DatasetDict(train=images, test=images).save_to_disk(tmp_path / "saved")
    for kind, data in {"images": images, "csv": rows, "json": rows, "parquet": rows, "arrow": rows}.items():
        (tmp_path / kind).mkdir()
        for split in ("train", "test"):
            path = tmp_path / kind / f"{split}.{'parquet' if kind == 'images' else kind}"
            if kind == "arrow":
                with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
                    writer.write_table(data.data.table)
                    writer.finalize()
            else:
                getattr(data, f"to_{path.suffix[1:]}")(path)
        inputs = "image" if data is images else "x"
        train = HuggingFace(path=f"{tmp_path}/{kind}", inputs=inputs, **OF_ROWS).splits().train
        assert train.targets.tolist() == data["label"]
        assert data is images or train[1] == (1.5, 0)
    for kind in ("images", "saved"):
        train, test, _ = HuggingFace(path=f"{tmp_path}/{kind}", inputs="image", **OF_ROWS).splits()
        assert (test[1][0].numpy() == pixels[1].transpose(2, 0, 1)).all()
        assert (test[1][1], train.targets.tolist(), train.classes) == (0, [1, 0], ["a", "b"])
    with pytest.raises(ValueError, match="none"):
        HuggingFace(path=f"{tmp_path}/csv", inputs="none", **OF_ROWS).splits()


OF_TABLE = dict(separator=",", numbers=["a"], categories=["c"], target="y", labels="classes", split_column="s")
OF_TABLE |= dict(group_column="g", weight_column=None, test=0.25)


def test_rows_that_are_trained_on_alone_tell_the_scale(tmp_path):
    frame = pd.DataFrame({"a": np.random.default_rng(0).normal(5, 2, 80), "c": ["x", "y", None, "z"] * 20})
    frame["y"], frame["s"], frame["g"] = [10, 9] * 40, ["train", "train", "val", "test"] * 20, np.arange(80) // 4
    frame.loc[::7, "a"], frame["f"] = np.nan, frame.a + 0.5
    frame.to_csv(path := str(tmp_path / "rows.csv"))
    frame[:0].to_csv(f"{path}.empty")
    splits = Table(path=path, **OF_TABLE).splits()
    scaler = StandardScaler().fit(frame[["a"]][frame.s == "train"])
    values = np.nan_to_num(scaler.transform(frame[["a"]][frame.s == "test"]))
    assert np.allclose(splits.test.inputs, np.hstack([values, np.zeros((20, 2))]), atol=1e-6)  # z is not in training
    assert splits.train.inputs[:2, 1:].tolist() == [[1, 0], [0, 1]]
    assert [splits.train.classes[target] for target in splits.train.targets[:2]] == ["10", "9"]
    held = hold_out(splits.train, 0.25, None, 0, True)[0].indices
    values = scaler.fit(frame[["a"]][frame.s == "train"].iloc[held]).transform(frame[["a"]][frame.s == "train"])
    assert np.allclose(splits.train.inputs[:, :1], np.nan_to_num(values), atol=1e-6)
    for keys, said in (
        ({"target": "a"}, "some rows have no a"),
        ({"target": "z"}, "there is no column z among .*a, c, y, s, g"),
        ({"numbers": None, "categories": []}, r"c have values .*categories=\[c\], or dataset.numbers=\[.*a,f\]"),
        ({"path": path + ".empty", "split_column": None}, "of 0 rows the share test=0.25 cannot be taken"),
        ({"target": "f"}, "f has fractions, and classes are wanted: type dataset.labels=numbers"),
    ):
        with pytest.raises(ValueError, match=said):
            Table(**{"path": path} | OF_TABLE | keys).splits()
