"""snapshot.mirror: copies of snapshots on a real S3 server, and runs that go on from there."""

import json
import shutil
import signal
import sys
import time

import pytest
import torch

from lockstep.errors import EXIT_RESUMABLE
from lockstep.snapshots.mirror import Mirror
from support.commands import TRAIN, wait_for
from support.object_store import URL, ObjectStore, listed
from support.worlds import same_bits

SMALL = ["model=linear", "trainer.batch_size=256", "logger=[console]"]
MIRROR = f"snapshot.mirror={URL}"


@pytest.fixture(scope="module")
def server():
    server = ObjectStore()
    yield server
    server.stop()


@pytest.fixture
def store(server):
    """Empty."""
    if server.files.exists(URL):
        server.files.rm(URL, recursive=True)
    return server


def test_a_lost_machine_costs_nothing_that_was_mirrored(train, store, tmp_path):
    two = ["launch=fork", "launch.nproc_per_node=2"]
    train(*SMALL, "trainer.epochs=4", *two, "hydra.run.dir=unbroken")
    words = [*SMALL, MIRROR, "trainer.epochs=4", "snapshot.keep_last=2", *two]
    train(*words, "trainer.pause_after=3", "hydra.run.dir=first", **store.variables)
    here = {path.stem for path in (tmp_path / "first" / "snapshots").glob("*.pt")}
    there = set(listed(store))
    assert {"best", "step_00000018"} <= there <= here  # one that a newer one has overtaken is left out
    files = [path for path in store.files.ls("bucket/run") if path.endswith(".pt")]
    assert len(files) == len(there)  # what is no longer here is gone there, too
    shutil.rmtree(tmp_path / "first")
    output = train(*words, f"resume={URL}", "hydra.run.dir=second", **store.variables).output
    assert "resumed from" in output
    assert same_bits(tmp_path / "unbroken", tmp_path / "second")
    assert max(listed(store)) == "step_00000024"
    refused = train(*SMALL, MIRROR, "hydra.run.dir=third", code=2, **store.variables).output
    assert "has the snapshots of another run" in refused


def test_a_numbered_snapshot_stays_there_until_a_newer_one_is_whole(tmp_path):
    here, there = tmp_path / "snapshots", tmp_path / "there"
    here.mkdir()
    for copied, left in (("step_1", {"step_1"}), ("best", {"step_1", "best"}), ("step_2", {"step_2", "best"})):
        torch.save({}, here / f"{copied}.pt")
        mirror = Mirror(there.as_uri(), here)
        mirror.put(here / f"{copied}.pt")
        mirror.close()
        (here / f"{copied}.pt").unlink()  # as one that a newer one has replaced here
        assert {path.stem for path in there.glob("*.json")} == left


def test_a_damaged_copy_is_passed_over(train, store, tmp_path):
    for epochs in (1, 2):  # the end of each waits for its copy
        pause = f"trainer.pause_after={epochs}"
        train(*SMALL, MIRROR, "trainer.epochs=2", pause, "hydra.run.dir=first", **store.variables)
    newest = json.loads(store.files.cat_file("bucket/run/step_00000012.json"))
    store.files.pipe_file(f"bucket/run/{newest['file']}", b"cut")
    words = [*SMALL, "trainer.epochs=2", f"resume={URL}", "hydra.run.dir=second"]
    output = train(*words, **store.variables).output
    assert "step_00000012 cannot be taken (its SHA-256 is another one" in output
    assert "step_00000006.pt" in output
    assert same_bits(tmp_path / "first", tmp_path / "second")


def test_a_store_that_is_lost_ends_nothing(start, tmp_path):
    store = ObjectStore()
    try:
        words = [*SMALL, MIRROR, "trainer.epochs=100000", "snapshot.every=100epochs", "hydra.run.dir=run"]
        run = start(sys.executable, TRAIN, *words, "evaluation.every=100000", **store.variables)
        wait_for(lambda: store.files.glob("bucket/run/*.json"), "a copy")
        store.stop()
        time.sleep(3)
        store.start()
        store.files.makedirs("bucket", exist_ok=True)  # the training may have made it already
        wait_for(lambda: store.files.glob("bucket/run/*.json"), "a copy in the store that has come back")
        run.send(signal.SIGTERM)
        output = run.finish(EXIT_RESUMABLE).output
        assert output.count("is tried again, and the training goes on") <= 1  # s3fs waits for some seconds itself
        newest = max(path.stem for path in (tmp_path / "run" / "snapshots").glob("step_*.pt"))
        assert newest in listed(store), output
    finally:
        store.stop()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["snapshot.mirror=gs://bucket/run"], "needs gcsfs; type pip install gcsfs"),
        (["snapshot.mirror=nothing://bucket/run"], "type snapshot.mirror=s3://<bucket>/<folder>"),
        ([MIRROR, "strategy=fsdp"], "type snapshot.format=full"),
        (["resume=file:///nowhere/run"], "lists no snapshot"),
    ],
)
def test_a_place_that_cannot_be_is_refused(words, said, train, tmp_path):
    output = train(*SMALL, *words, code=2).output
    assert said in output
    assert not list(tmp_path.rglob("*.pt"))
