"""Every data set of conf/dataset, and draws by loader.sampling: the same numbers on 2 and 3 ranks, and the same bits
from a snapshot of mid-epoch on."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from lockstep.data.build import prepare_first
from support.configs import composed
from support.shards import write_tars
from support.worlds import distance, in_world, same_bits, train_all, weights

BASE = ["trainer.precision=fp64", "trainer.batch_size=16", "trainer.epochs=9", "trainer.max_steps=5", "logger=[]"]
BASE += ["scheduler=constant", "snapshot.every=3steps"]
NET = ["model=mlp", "model.width=8"]
GPT = ["dataset=text", "model=gpt", "model.width=16", "model.heads=2", "model.layers=1", "dataset.block=8"]
GPT += ["dataset.tokens_dir={}/tokens"]
IMAGES = [*NET, "dataset.root={}/images", "dataset.size=8", "dataset.cache_dir={}/decoded"]
CROPS = [
    f"loader.{key}=[{{{{_target_:torchvision.transforms.v2.{kind}Crop,size:6}}}}]"
    for key, kind in (("transforms", "Random"), ("test_transforms", "Center"))
]
MIXED = "loader.batch_transforms=[{{_target_:torchvision.transforms.v2.MixUp,num_classes:null}}]"
SHIFTED = "loader.augment={{_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}}"
TABLE = ["dataset=table", "dataset.target=kind", "dataset.categories=[region]", *NET]
TARS = ["dataset=tar_shards", "dataset.urls={}/train-*.tar", "dataset.test_urls={}/test-*.tar", *NET]
PAIR = ["dataset=pair", *NET]
NOISY, UNEVEN = (
    [*PAIR, *(f"dataset.{half}._target_=support.own_data.{name}" for half in ("train", "test"))]
    for name in ("Noisy", "Uneven")
)
WEIGHTED = [*UNEVEN, "loader.sampling=weights"]
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
    "text": [*GPT, "dataset.path={}/train-0.txt"],
    "texts": [*GPT, "dataset.path={}/train*.txt", "dataset.test_path={}/train-0.txt", "dataset.tokenizer=bytes"],
    "tokens": [*GPT, "dataset.path={}/train.bin", "dataset.tokenizer=uint16", "dataset.classes=40"],
    "tar_shards": [*TARS, "dataset.index_dir={}/indexes", "dataset.inputs=png", "dataset.size=8"],
    "pair": [*NOISY, "dataset.classes=2", "loader.num_workers=1", "trainer.gradient_accumulation_steps=2"],
    "uneven": UNEVEN,
    "by_class": [*UNEVEN, "loader.sampling=balanced", "loader.num_workers=1"],
    "by_weight": [*WEIGHTED, "trainer.gradient_accumulation_steps=3"],
    "by_weight_in_virtual_ranks": [*WEIGHTED, "strategy=virtual_ranks", "strategy.count=6", "trainer.precision=fp32"],
    "huggingface": ["dataset=huggingface", "dataset.path={}/rows", "dataset.inputs=x", *NET],
}
SETS["tar_shards"] += ["loader.num_workers=1"]
SETS["texts"] += ["dataset.stride=8"]


def write_all(folder):
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


def write_rows(folder):
    datasets = pytest.importorskip("datasets")
    inputs = np.random.default_rng(1).random((50, 3)).tolist()
    rows = datasets.Dataset.from_dict({"x": inputs, "label": [number % 2 for number in range(50)]})
    rows.train_test_split(10, seed=0).save_to_disk(str(folder / "rows"))


@pytest.mark.timeout(900)  # a busy machine
def test_each_data_set_gives_the_same_numbers_on_any_ranks_and_after_a_resume(tmp_path):
    write_all(tmp_path)
    write_rows(tmp_path)

    def configs(run, *more):
        found = []
        for name in SETS:
            words = [*SETS[name], f"run_dir={{}}/{name}/{run}", *(word.format(name) for word in more)]
            found.append(composed(*BASE, *(word.format(tmp_path) for word in words), whole=False))
        return found

    for config in configs("two"):
        prepare_first(config)
    resumed = configs("resumed", "resume={{}}/{}/two/snapshots/step_00000003")
    in_world(2, train_all, [*configs("two"), *resumed], limit=400)
    in_world(3, train_all, configs("three"), limit=400)
    wrong = {}
    for name in SETS:
        two = weights(tmp_path / name / "two")
        far = distance(two, weights(tmp_path / name / "three"))
        bits = same_bits(tmp_path / name / "two", tmp_path / name / "resumed")
        print(f"{name:24} {far:.1e} {'same bits' if bits else 'OTHER BITS'}")
        if not (far < (1e-9 if "virtual" not in name else 1e-30) and bits and torch.isfinite(two).all()):
            wrong[name] = far, bits
    assert not wrong
    plain, *drawn = (weights(tmp_path / name / "two") for name in ("uneven", "by_class", "by_weight"))
    assert min(distance(plain, one) for one in drawn) > 1e-3
