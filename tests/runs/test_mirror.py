"""snapshot.mirror: copies of snapshots on a real S3 server, and runs that go on from there."""

import shutil
import signal
import sys
import time

import pytest

from lockstep.errors import EXIT_RESUMABLE
from support.commands import TRAIN, wait_for
from support.object_store import KEYS, MIRROR, URL, ObjectStore, listed
from support.worlds import same_bits

SMALL = ["model=linear", "trainer.batch_size=256", "logger=[console]"]


@pytest.fixture
def store():
    server = ObjectStore()
    yield server
    server.stop()


def test_a_lost_machine_costs_nothing_that_was_mirrored_and_a_damaged_copy_is_passed_over(train, store, tmp_path):
    words = [*SMALL, "trainer.epochs=3", "launch=fork", "launch.nproc_per_node=2", "snapshot.keep_last=2"]
    train(*words, "hydra.run.dir=unbroken")
    for epochs in (1, 2):  # the end of each waits for its copy
        train(*words, MIRROR, f"trainer.pause_after={epochs}", "hydra.run.dir=first", **store.variables)
    here, there = {path.name for path in (tmp_path / "first" / "snapshots").iterdir()}, set(listed(store))
    assert {"step_00000006", "step_00000012"} <= there <= here
    assert any(name.startswith("best") for name in there)
    assert len(store.files.ls("bucket/run")) == len(there)  # what is no longer here is gone there, too
    (newest,) = store.files.glob("bucket/run/step_00000012-*")
    store.files.pipe_file(f"{newest}/state.pt", b"cut")
    shutil.rmtree(tmp_path / "first")
    output = train(*words, MIRROR, f"resume={URL}", "hydra.run.dir=second", **store.variables).output
    assert f"{newest.rpartition('/')[2]} cannot be taken (its state.pt is cut off or changed)" in output
    assert "/step_00000006" in next(line for line in output.splitlines() if "resumed from" in line)
    assert same_bits(tmp_path / "unbroken", tmp_path / "second")
    assert store.files.glob("bucket/run/step_00000018-*/manifest.json")
    refused = train(*SMALL, MIRROR, "hydra.run.dir=third", code=2, **store.variables).output
    assert "has the snapshots of another run" in refused


@pytest.mark.drill
def test_a_store_that_is_lost_ends_nothing(start, store, tmp_path):
    words = [*SMALL, MIRROR, "trainer.epochs=100000", "snapshot.every=100epochs", "hydra.run.dir=run"]
    run = start(sys.executable, TRAIN, *words, "evaluation.every=100000", **store.variables)
    wait_for(lambda: store.files.glob("bucket/run/*/manifest.json"), "a copy")
    store.stop()
    time.sleep(3)
    store.start()
    store.files.makedirs("bucket", exist_ok=True)  # the training may have made it already
    back = "a copy in the store that has come back"
    wait_for(lambda: store.files.glob("bucket/run/*/manifest.json"), back, limit=120)  # s3fs waits half a minute
    run.send(signal.SIGTERM)
    output = run.finish(EXIT_RESUMABLE).output
    assert output.count("the next ones are tried, and the training goes on") <= 1  # s3fs waits for some seconds itself
    newest = max(path.stem for path in (tmp_path / "run" / "snapshots").glob("step_*[0-9]"))
    assert newest in listed(store), output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([MIRROR, "snapshot.mirror.to=gs://bucket/run"], "Please install gcsfs"),
        ([MIRROR, "snapshot.mirror.to=no://bucket/run"], "type snapshot.mirror.to=<an address that fsspec can open>"),
        (["resume=file:///nowhere/run"], "lists no snapshot"),
        ([MIRROR], "endpoint, or type snapshot.mirror.to=<another place>"),
    ],
)
def test_a_place_that_cannot_be_is_refused(words, said, train, tmp_path):
    output = train(*SMALL, *words, code=2, AWS_ENDPOINT_URL="http://127.0.0.1:9", **KEYS).output
    assert said in output
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("*.pt"))
