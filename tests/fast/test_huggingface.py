"""Hugging Face's data sets: columns of files are samples."""

import numpy as np
import pytest
from PIL import Image

from lockstep.data.huggingface import HuggingFace

datasets = pytest.importorskip("datasets")
KEYS = dict(train_split="train", test_split="test", val_split=None, targets="label", size=2)


@pytest.mark.parametrize("name", ["parquet", "saved"])
def test_columns_are_samples(tmp_path, monkeypatch, name):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 2, 3), dtype=np.uint8)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"image": [*map(Image.fromarray, pixels)], "label": [1, 0]}, features=kinds)
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "saved")
    (tmp_path / "parquet").mkdir()
    [rows.to_parquet(tmp_path / "parquet" / f"{split}.parquet") for split in ("train", "test")]
    train, test, _ = HuggingFace(path=f"{tmp_path}/{name}", inputs="image", **KEYS).splits()
    image, target = test[1]
    assert (image.numpy() == pixels[1].transpose(2, 0, 1)).all()
    assert (target, train.targets.tolist(), train.classes) == (0, [1, 0], ["a", "b"])


@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "arrow"])
def test_columns_of_files_of_any_kind(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_dict({"x": [0.5, 1.5, 2.5], "y": [1, 2, 3], "label": [2, 0, 1]})
    (tmp_path / "files").mkdir()
    for split in ("train", "test"):
        path = tmp_path / "files" / f"{split}.{kind}"
        if kind == "arrow":
            with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
                writer.write_table(rows.data.table)
                writer.finalize()
        else:
            getattr(rows, f"to_{kind}")(path)
    train = HuggingFace(path=f"{tmp_path}/files", inputs="x", **KEYS).splits().train
    assert ([train[number] for number in range(3)][1], train.targets.tolist()) == ((1.5, 0), [2, 0, 1])
    with pytest.raises(ValueError, match="none"):
        HuggingFace(path=f"{tmp_path}/files", inputs="none", **KEYS).splits()
