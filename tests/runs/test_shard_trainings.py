"""Trainings on tar files. Their numbers on several ranks are those of test_every_data_set."""

from pathlib import Path
from typing import Any

from support.shards import write_tars

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


def test_pictures_are_learned_and_what_is_typed_wrong_is_answered(train: Any, tmp_path: Path) -> None:
    write_tars(tmp_path, "train", [20, 30])
    write_tars(tmp_path, "test", [10])
    pictures = [*BASE, *TARS, "optimizer.lr=0.1", "trainer.epochs=8", "loader.num_workers=0"]
    run = train(*pictures, "loader.sampling=balanced", "hydra.run.dir=pictures")
    assert "45 training, 5 validation and 10 test samples" in run.output
    assert run.epochs[-1].endswith("accuracy 1.0000")
    assert "test loss" in train("mode=evaluate", "resume=pictures").output
    missing = train(*pictures, "dataset.test_urls=gone-*.tar", code=2)
    assert "the test data has no samples" in missing.sentence
