"""Trainings on tar files and on documents: the same numbers at any number of ranks and after a stop in mid-epoch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commands import Command
from support.shards import uneven, write_tars
from support.worlds import distance, weights

BASE = ["trainer.precision=fp64", "trainer.batch_size=16", "trainer.epochs=2", "loader.num_workers=1"]
TARS = [
    *(
        "dataset=tar_shards",
        "dataset.urls=train-*.tar",
        "dataset.test_urls=[test-000.tar]",
        "dataset.index_dir=indexes",
    ),
    *("dataset.inputs=png", "dataset.size=8", "model=mlp", "model.width=8"),
]
DOCUMENTS = [
    *("dataset=documents", "dataset.path=train-*.jsonl", "dataset.test_path=test-*.jsonl", "dataset.tokens_dir=tokens"),
    *("dataset.block=8", "model.width=16", "model.heads=2", "model.layers=2"),
]


def write_documents(folder: Path, name: str, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        texts = [f"Document {line} of {number} says {'ever more ' * (line % 5)}." for line in range(size)]
        (folder / f"{name}-{number:03}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.parametrize("words", [TARS, DOCUMENTS], ids=["tar_shards", "documents"])
def test_a_run_on_two_ranks_that_goes_on_with_three_ends_as_one_on_one_rank(
    train: Callable[..., Command], tmp_path: Path, words: list[str]
) -> None:
    if words is TARS:
        write_tars(tmp_path, "train", uneven(24))
        write_tars(tmp_path, "test", [9])
    else:
        write_documents(tmp_path, "train", [7, 1, 20])
        write_documents(tmp_path, "test", [5])
    alone = train(*BASE, *words, "hydra.run.dir=alone")
    split = [*BASE, *words, "hydra.run.dir=split", "launch=fork"]
    train(*split, "launch.nproc_per_node=2", "trainer.max_steps=3")
    resumed = train(*split, "launch.nproc_per_node=3")
    assert resumed.epochs[-1] == alone.epochs[-1]
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "split")) < 1e-9


def test_pictures_are_learned_and_what_is_typed_wrong_is_answered(train: Any, tmp_path: Path) -> None:
    write_tars(tmp_path, "train", [20, 30])
    write_tars(tmp_path, "test", [10])
    pictures = [*BASE, *TARS, "optimizer.lr=0.1", "trainer.epochs=8", "loader.num_workers=0"]
    run = train(*pictures, "loader.sampling=balanced", "hydra.run.dir=pictures")
    assert "45 training, 5 validation and 10 test samples" in run.output
    assert run.epochs[-1].endswith("accuracy 1.0000")
    assert "test loss" in train("mode=evaluate", "resume=pictures").output
    missing = train(*pictures, "dataset.test_urls=gone-*.tar", code=2)
    assert "gone-*.tar cannot be indexed in indexes (" in missing.sentence
