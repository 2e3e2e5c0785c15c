"""Hugging Face's data sets: columns of files are samples."""

import numpy as np
import pytest
from PIL import Image

from lockstep.data.huggingface import HuggingFace

datasets = pytest.importorskip("datasets")
KEYS = dict(train_split="train", test_split="test", val_split=None, targets="label", size=2)


def test_columns_of_files_of_any_kind_are_samples(tmp_path, monkeypatch):
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
        train = HuggingFace(path=f"{tmp_path}/{kind}", inputs="image" if data is images else "x", **KEYS).splits().train
        assert train.targets.tolist() == data["label"]
        assert data is images or train[1] == (1.5, 0)
    for kind in ("images", "saved"):
        train, test, _ = HuggingFace(path=f"{tmp_path}/{kind}", inputs="image", **KEYS).splits()
        assert (test[1][0].numpy() == pixels[1].transpose(2, 0, 1)).all()
        assert (test[1][1], train.targets.tolist(), train.classes) == (0, [1, 0], ["a", "b"])
    with pytest.raises(ValueError, match="none"):
        HuggingFace(path=f"{tmp_path}/csv", inputs="none", **KEYS).splits()
