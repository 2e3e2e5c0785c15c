"""Trainings on shards: the same numbers at any number of ranks and after a kill, and what is typed wrong."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commands import TRAIN, Command, wait_for
from support.far_store import far_store
from support.run_folders import position
from support.shards import uneven, write_tars
from support.worlds import distance, weights

BASE = [
    *("dataset=shards", "dataset.urls=train-*.tar", "dataset.test_urls=[test-000.tar]", "data_dir=data"),
    *("dataset.inputs=npy", "dataset.window=50", "model=mlp", "model.width=8", "trainer.precision=fp64"),
    *(
        "trainer.batch_size=16",
        "trainer.epochs=8",
        "optimizer.lr=1e-3",
        "snapshot.every=1steps",
        "loader.num_workers=1",
    ),
]


def test_a_run_on_two_ranks_that_is_killed_and_goes_on_with_three_ends_as_one_on_one_rank(
    train: Callable[..., Command], start: Callable[..., Command], tmp_path: Path
) -> None:
    write_tars(tmp_path, "train", uneven(24))
    write_tars(tmp_path, "test", [9])
    alone = train(*BASE, "hydra.run.dir=alone")
    assert alone.output.count("counted") == 2
    killed = [*BASE, "hydra.run.dir=killed", "launch=fork"]
    command = start(sys.executable, TRAIN, *killed, "launch.nproc_per_node=2")
    wait_for(lambda: position(tmp_path / "killed")[0] >= 5, "snapshot in the first epoch")  # of 11 steps
    command.kill_group()
    command.finish(code=None)
    resumed = train(*killed, "launch.nproc_per_node=3")
    assert "counted" not in resumed.output
    assert "resumed" in (tmp_path / "killed" / "train.log").read_text()
    assert resumed.epochs[-1].split("train loss")[0] == alone.epochs[-1].split("train loss")[0]
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "killed")) < 1e-9


def test_pictures_are_learned_and_what_is_typed_wrong_is_answered(train: Any, tmp_path: Path) -> None:
    write_tars(tmp_path, "train", [20, 30])
    write_tars(tmp_path, "test", [10])
    pictures = [*BASE, "dataset.inputs=png", "dataset.size=8", "optimizer.lr=0.1", "loader.num_workers=0"]
    run = train(*pictures, "loader.sampling=balanced", "hydra.run.dir=pictures")
    assert "45 training, 5 validation and 10 test samples" in run.output
    assert run.epochs[-1].endswith("accuracy 1.0000")
    assert "test loss" in train("mode=evaluate", "resume=pictures").output
    missing = train(*pictures, "dataset.test_urls=gone-*.tar", code=2)
    assert "dataset.test_urls=gone-*.tar names no file" in missing.sentence
    assert "type dataset.test_urls=<a pattern such as data/test-*.tar>" in missing.sentence


def test_ranks_and_workers_read_a_store_that_is_gone_for_a_while(
    train: Callable[..., Command], start: Callable[..., Command], tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    stored = tmp_path / "stored"
    stored.mkdir()
    write_tars(stored, "train", [40, 30, 50])
    write_tars(stored, "test", [9])
    local = train(*BASE, f"dataset.urls={stored}/train-*.tar", f"dataset.test_urls={stored}/test-*.tar")
    with far_store(stored, delay=0.02) as store:
        far = [f'dataset.urls="{store.url}/train-{{000..002}}.tar"', f"dataset.test_urls='{store.url}/test-000.tar'"]
        options = [*BASE, *far, "launch=fork", "launch.nproc_per_node=2", "hydra.run.dir=far"]
        command = start(sys.executable, TRAIN, *options)
        wait_for(lambda: list((tmp_path / "far").glob("snapshots/*.pt")), "snapshot")
        store.vanish(5)
        command.finish()
    assert command.epochs == local.epochs
    assert "does not answer" in command.output
