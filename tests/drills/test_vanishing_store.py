"""Trainings on shards of a store that takes 100 ms for a request, fails 5 % of them, and is gone for a minute."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import ROOT, TRAIN, Command, wait_for
from support.far_store import far_store
from support.shards import write_tars

EPOCHS = 3


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.parametrize("protocol", ["http", "s3"])
def test_a_store_that_is_gone_for_a_minute_costs_no_sample_and_one_line(
    train: Callable[..., Command], start: Callable[..., Command], tmp_path: Path, protocol: str
) -> None:
    pytest.importorskip("aiohttp" if protocol == "http" else "s3fs")
    for name in ("stored", "local", "far"):
        (tmp_path / name).mkdir()
    write_tars(tmp_path / "stored", "train", [400, 300, 500])
    write_tars(tmp_path / "stored", "test", [30])
    words = [
        *("dataset=shards", "data_dir=data", "dataset.inputs=npy", "model=mlp", "model.width=8"),
        *("trainer.precision=fp64", "trainer.batch_size=16", f"trainer.epochs={EPOCHS}", "optimizer.lr=1e-3"),
        *("loader.num_workers=2", "loader.validation=100", "snapshot.every=10steps"),
    ]

    def typed(place: str, folder: str) -> list[str]:
        shards = [f'dataset.urls="{place}/train-{{000..002}}.tar"', f"dataset.test_urls='{place}/test-000.tar'"]
        written = f"[{{_target_:support.read_samples.WrittenDown,folder:{tmp_path / folder}}}]"
        return [*words, *shards, f"loader.transforms={written}", f"hydra.run.dir=run_{folder}"]

    local = train(*typed(str(tmp_path / "stored"), "local"), PYTHONPATH=ROOT / "tests")
    with far_store(tmp_path, delay=0.1) as store:
        place = f"{store.url}/stored" if protocol == "http" else "s3://stored"
        options = [*typed(place, "far"), "launch=fork", "launch.nproc_per_node=2"]
        command = start(sys.executable, TRAIN, *options, PYTHONPATH=ROOT / "tests", **store.variables)
        wait_for(lambda: list((tmp_path / "run_far").glob("snapshots/step_*.pt")), "snapshot", 120)
        before = sum(read_by_workers(tmp_path / "far").values())
        store.vanish(60, is_silent=protocol == "http")
        command.finish(limit=400)
    assert 0 < before < EPOCHS * 1100
    assert command.epochs == local.epochs
    assert read_by_workers(tmp_path / "far") == read_by_workers(tmp_path / "local")
    assert {*read_by_workers(tmp_path / "far").values()} == {EPOCHS}
    assert (tmp_path / "run_far" / "train.log").read_text().count("does not answer") == 1


def read_by_workers(folder: Path) -> Counter[str]:
    """How many times each sample was read."""
    return Counter(line for path in folder.iterdir() for line in path.read_text().split())
