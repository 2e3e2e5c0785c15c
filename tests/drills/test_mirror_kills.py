"""Runs that are killed while their snapshots are copied to an S3 server: what is listed there loads."""

import os
import random
import signal
import sys
import time

import pytest

from support.commands import TRAIN, wait_for
from support.object_store import MIRROR, URL, ObjectStore, listed

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "6"))  # 20 by `make matrices`


def newest(store):
    """The name of the newest numbered snapshot that the store lists, "" without one."""
    paths = [path.split("/") for path in store.files.find("bucket/run")]  # a glob fails where a folder goes meanwhile
    names = [folder for *_, folder, file in paths if file == "manifest.json" and folder.startswith("step_")]
    return max((name.partition("-")[0] for name in names), default="")


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_what_a_killed_run_has_listed_loads(start, tmp_path):
    store, draw, seen = ObjectStore(), random.Random(0), []
    words = ["model=mlp", "model.width=1500", "trainer.epochs=2000", "snapshot.every=3steps", "logger=[console]"]
    try:
        for number in range(KILLS):
            resume = [f"resume={URL}"] if newest(store) else []  # a killed run's last request may have come to its end
            folder = f"hydra.run.dir=run{number}"
            typed = [*words, MIRROR, *resume, folder]
            run = start(sys.executable, TRAIN, *typed, **store.variables)
            snapshots = tmp_path / f"run{number}" / "snapshots"
            wait_for(lambda: list(snapshots.glob("step_*[0-9]")), "snapshot")  # noqa: B023
            if number % 3 == 2:
                wait_for(lambda: newest(store) > seen[-1], "newer snapshot in the store")
            time.sleep(draw.uniform(0, 2))
            assert run.process.poll() is None, run.finish(code=None).output
            os.killpg(run.process.pid, signal.SIGKILL)
            run.finish(code=None)
            seen.append(max((name for name in listed(store) if name.startswith("step")), default=""))
        assert seen == sorted(seen)
        assert len(set(seen)) > 2
    finally:
        store.stop()
