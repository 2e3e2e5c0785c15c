"""Runs are killed while they write or copy a snapshot: the newest whole one is resumed, and they end right."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from lockstep.snapshots.files import list_snapshots
from support.commands import PYTHON_TRAIN, children, wait_for
from support.object_store import MIRROR, URL, ObjectStore, listed
from support.run_folders import count_resumptions, read_log
from support.worlds import distance, same_bits, weights

pytestmark = pytest.mark.drill

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "3"))
TRAINING = [
    *PYTHON_TRAIN, "snapshot.every=1steps", "snapshot.keep_last=2", "model=mlp", "optimizer=adamw", "logger=[]",
    "trainer.batch_size=32", "trainer.deterministic=true", "scheduler=constant", "trainer.epochs=1000",
]  # fmt: skip
EXACT = ["model.width=256", "trainer.precision=fp64"]


def unfinished(folder):
    return list(folder.glob("step_*.tmp"))


def descendants(pid):
    """A process and all that it has started, the youngest first: a rank that outlives its launcher would save."""
    return [other for child in children(pid) for other in descendants(child)] + [pid]


def kill_while_writing(run, folder):
    """Kill all ranks and the launcher when they have begun a snapshot. Returns whether it was not finished."""
    before = list_snapshots(folder)[:1]
    wait_for(lambda: list_snapshots(folder)[:1] != before, "a snapshot of this start")
    pids = descendants(run.process.pid)
    time.sleep(random.uniform(0, 0.2))
    deadline = time.monotonic() + 60
    while not unfinished(folder):  # without a pause: writing takes milliseconds
        assert time.monotonic() < deadline, "no rank writes parts"
    time.sleep(random.uniform(0, 0.02))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.finish(code=None)
    run.remove_folders()
    return bool(unfinished(folder))


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["model.width=2048"], [("fsdp", 2)]),
        (EXACT, [("ddp", 1), ("fsdp", 2), ("pipeline", 2), ("ddp", 3), ("fsdp", 4), ("tensor_parallel", 2)]),
    ],
    ids=["same ranks", "changing ranks and strategies"],
)
@pytest.mark.timeout(600 + 50 * KILLS)
def test_a_run_killed_while_it_writes_goes_on_from_the_newest_whole_snapshot(
    start, start_faulty, tmp_path, words, places
):
    limit = 120 + 12 * KILLS  # for a run that saves each of its 12 * KILLS steps

    def typed(number, folder):
        strategy, size = places[number % len(places)]
        launch = ["launch=fork", f"launch.nproc_per_node={size}"]
        plan = ["strategy.parallelize_plan=[{1:colwise},{4:rowwise}]"] * (strategy == "tensor_parallel")
        own = [*words, *launch, f"strategy={strategy}", *plan, f"trainer.max_steps={12 * KILLS}"]
        return [*TRAINING, *own, f"hydra.run.dir={folder}"]

    start(*typed(0, "undisturbed")).finish(limit=limit)
    folder, kills, cut_short = tmp_path / "run" / "snapshots", 0, 0
    while kills < KILLS or (not cut_short and kills < 2 * KILLS):  # a few kills may all come a moment too late
        cut_short += kill_while_writing(start_faulty(*typed(kills, "run")), folder)
        kills += 1
    start(*typed(kills, "run")).finish(limit=limit)
    print(f"{kills} kills, {cut_short} of them before the snapshot was whole")
    assert cut_short
    assert count_resumptions(tmp_path / "run") == kills
    assert "and passed over" not in read_log(tmp_path / "run")
    assert not unfinished(folder)
    if len(places) == 1:
        assert same_bits(tmp_path / "undisturbed", tmp_path / "run")
    assert distance(weights(tmp_path / "undisturbed"), weights(tmp_path / "run")) < 1e-9


# Runs whose snapshots are copied to an S3 server: what is listed there loads.

MIRRORED = max(KILLS, 4)


def newest(store):
    paths = [path.split("/") for path in store.files.find("bucket/run")]  # a glob fails where a folder goes meanwhile
    names = [folder for *_, folder, file in paths if file == "manifest.json" and folder.startswith("step_")]
    return max((name.partition("-")[0] for name in names), default="")


@pytest.mark.timeout(900)
def test_what_a_killed_run_has_listed_loads(start, tmp_path):
    store, draw, seen = ObjectStore(), random.Random(0), []
    words = ["model=mlp", "model.width=1500", "trainer.epochs=2000", "snapshot.every=3steps", "logger=[console]"]
    try:
        for number in range(MIRRORED):
            resume = [f"resume={URL}"] if newest(store) else []  # a killed run's last request may have come to its end
            folder = f"hydra.run.dir=run{number}"
            typed = [*words, MIRROR, *resume, folder]
            run = start(*PYTHON_TRAIN, *typed, **store.variables)
            snapshots = tmp_path / f"run{number}" / "snapshots"
            wait_for(lambda: list(snapshots.glob("step_*[0-9]")), "snapshot")  # noqa: B023
            if number % 2 == 1:
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
