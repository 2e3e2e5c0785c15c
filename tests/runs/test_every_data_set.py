"""Every data set of conf/dataset: the same numbers on 1, 2 and 3 ranks, and the same bits after a stop in mid-epoch."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from lockstep.data.build import prepare_first
from support.configs import composed
from support.shards import write_tars
from support.worlds import distance, in_world, same_bits, train_all, weights

BASE = ["trainer.precision=fp64", "trainer.batch_size=16", "trainer.epochs=9", "scheduler=constant", "logger=[]"]
NET = ["model=mlp", "model.width=8"]
GPT = [
    "model=gpt",
    "model.width=16",
    "model.heads=2",
    "model.layers=1",
    "dataset.block=8",
    "dataset.tokens_dir={}/tokens",
]
IMAGES = [*NET, "dataset.root={}/images", "dataset.size=8", "dataset.cache_dir={}/decoded"]
CROPS = [
    f"loader.{key}=[{{{{_target_:torchvision.transforms.v2.{kind}Crop,size:6}}}}]"
    for key, kind in (("transforms", "Random"), ("test_transforms", "Center"))
]
MIXED = "loader.batch_transforms=[{{_target_:torchvision.transforms.v2.MixUp,num_classes:null}}]"
SHIFTED = "loader.augment={{_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}}"
TABLE = ["dataset=table", "dataset.target=kind", "dataset.categories=[region]", *NET]
SETS = {
    "digits": ["dataset=digits", *NET, MIXED],
    "balanced_digits": ["dataset=digits", *NET, SHIFTED, "loader.sampling=balanced"],
    "a_fold_of_digits": ["dataset=digits", *NET, "loader.folds=3", "loader.fold=1"],
    "mnist": ["dataset=mnist", "dataset.root={}", *NET],
    "fashion_mnist": ["dataset=fashion_mnist", "dataset.root={}", *NET],
    "random": ["dataset=random", "dataset.samples=61", "model=linear"],
    "image_folder": ["dataset=image_folder", *IMAGES, SHIFTED],
    "image_folder_read": ["dataset=image_folder", *IMAGES, "dataset.cache=false", *CROPS, "dataset.shape=[3,6,6]"],
    "image_csv": ["dataset=image_csv", *IMAGES, "loader.num_workers=1", "dataset.group_column=group"],
    "table_of_CSV": [*TABLE, "dataset.path={}/rows.csv", "dataset.group_column=group"],
    "table_of_parquet": [*TABLE, "dataset.path={}/rows.parquet"],
    "text": ["dataset=text", *GPT, "dataset.path={}/train-0.txt"],
    "texts": [
        *("dataset=text", *GPT, "dataset.path={}/train*.txt", "dataset.test_path={}/train-0.txt"),
        *("dataset.tokenizer=bytes", "dataset.stride=8"),
    ],
    "tokens": ["dataset=text", *GPT, "dataset.path={}/train.bin", "dataset.tokenizer=uint16", "dataset.classes=40"],
    "tar_shards": [
        *("dataset=tar_shards", "dataset.urls={}/train-*.tar", "dataset.test_urls={}/test-*.tar"),
        *("dataset.index_dir={}/indexes", "dataset.inputs=png", "dataset.size=8", "loader.num_workers=1", *NET),
    ],
    "pair": ["dataset=pair", *(f"dataset.{half}._target_=support.own_data.Noisy" for half in ("train", "test")), *NET],
}
SETS["pair"] += ["dataset.classes=2", "loader.num_workers=1", "trainer.gradient_accumulation_steps=2"]
SETS["huggingface"] = ["dataset=huggingface", "dataset.path={}/rows", "dataset.inputs=x", *NET]


def write_all(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("MNIST", "FashionMNIST"):
        (folder / name / "raw").mkdir(parents=True)
        for part, count in (("train", 60), ("t10k", 20)):
            for kind, values in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
                head = bytes([0, 0, 8, len(values)]) + b"".join(size.to_bytes(4, "big") for size in values)
                pixels = draw.integers(0, 10, values, dtype=np.uint8)
                (folder / name / "raw" / f"{part}-{kind}-ubyte").write_bytes(head + pixels.tobytes())
    lines = ["file,label,group,split"]
    for number in range(60):
        split, label = ("train", "test")[number // 45], "ab"[number % 2]
        path = Path(split, label, f"{number}.png")
        (folder / "images" / path.parent).mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (9, 8 + number % 3, 3), dtype=np.uint8)).save(folder / "images" / path)
        lines.append(f"{path},{label},{number // 3},{split}")
    (folder / "images" / "labels.csv").write_text("\n".join(lines))
    numbers = np.arange(90)
    rows = pd.DataFrame({"acid": draw.random(90), "region": numbers % 4, "group": numbers // 2, "kind": numbers % 3})
    rows.to_csv(folder / "rows.csv", index=False)
    rows.drop(columns="group").to_parquet(folder / "rows.parquet")
    for number in (1, 2):
        texts = [f"Line {line} of {number} says {'ever more ' * (line % 5)}.\n" for line in range(9)]
        (folder / f"train-{number}.txt").write_text("".join(texts))
    draw.integers(0, 40, 500).astype(np.uint16).tofile(folder / "train.bin")
    (folder / "train-0.txt").write_text("The quick brown fox. " * 40)
    write_tars(folder, "train", [20, 1, 30])
    write_tars(folder, "test", [9])


def write_rows(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    inputs = np.random.default_rng(1).random((50, 3)).tolist()
    rows = datasets.Dataset.from_dict({"x": inputs, "label": [number % 2 for number in range(50)]})
    rows.train_test_split(10, seed=0).save_to_disk(str(folder / "rows"))


def test_each_data_set_gives_the_same_numbers_on_any_ranks_and_after_a_stop(tmp_path: Path) -> None:
    write_all(tmp_path)
    write_rows(tmp_path)

    def configs(run: str, steps: int) -> list[Any]:
        found = []
        for name, words in SETS.items():
            typed = [word.format(tmp_path) for word in words]
            more = [f"run_dir={tmp_path / 'runs' / name / run}", f"trainer.max_steps={steps}"]
            found.append(composed(*BASE, *typed, *more, whole=False))
        return found

    for config in configs("one", 7):
        prepare_first(config)
    in_world(1, train_all, configs("one", 7))
    in_world(2, train_all, [*configs("two", 7), *configs("resumed", 3)])
    in_world(2, train_all, configs("resumed", 7))
    in_world(3, train_all, configs("three", 7))
    wrong = {}
    for name in SETS:
        place = tmp_path / "runs" / name
        one = weights(place / "one")
        far = max(distance(one, weights(place / other)) for other in ("two", "three"))
        bits = same_bits(place / "two", place / "resumed")
        print(f"{name:24} {far:.1e} {'same bits' if bits else 'OTHER BITS'}")
        if not (far < 1e-9 and bits and torch.isfinite(one).all()):
            wrong[name] = far, bits
    assert not wrong
