"""Tars: each sample is read by its number, in any process, with few files open."""

import io
import os
import tarfile
from multiprocessing import get_context

import numpy as np
import pytest
from PIL import Image

from lockstep.data.tar_shards import TarShards

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


def test_images_have_any_case_and_no_dots_in_their_names(keys, tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(pixels).save(stored := io.BytesIO(), "png")
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name in ("1.{}", "cat v1.0.{}"):
            add(file, name.format("PNG"), stored.getvalue())
            add(file, name.format("CLS"), b"1")
    keys |= dict(urls=f"{tmp_path}/a.tar", test_urls=f"{tmp_path}/a.tar", inputs="jpg;png")
    TarShards(**keys).prepare()
    ((image, target),) = TarShards(**keys).splits().test
    assert (image.permute(1, 2, 0).tolist(), target) == (pixels.tolist(), 1)


def test_a_tar_that_is_cut_is_named(keys, tmp_path):
    TarShards(**keys).prepare()
    for cut in (7168, 5000, 512):
        os.truncate(tmp_path / "part-03.tar", cut)
        with pytest.raises(ValueError, match=r"part-03.tar: "):
            TarShards(**keys).prepare()
