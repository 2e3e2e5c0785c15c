"""Runs are killed while the ranks write a snapshot: the newest whole one is resumed, and they end right."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.snapshots.files import list_snapshots
from support.commands import PYTHON_TRAIN, Command, children, wait_for
from support.run_folders import count_resumptions, read_log
from support.worlds import distance, same_bits, weights

pytestmark = pytest.mark.drill

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "3"))
TRAINING = [
    *PYTHON_TRAIN, "snapshot.every=1steps", "snapshot.keep_last=2", "model=mlp", "optimizer=adamw", "logger=[]",
    "trainer.batch_size=32", "trainer.deterministic=true", "scheduler=constant", "trainer.epochs=1000",
]  # fmt: skip
EXACT = ["model.width=256", "trainer.precision=fp64"]


def unfinished(folder: Path) -> list[Path]:
    """The snapshots that are being written."""
    return list(folder.glob("step_*.tmp"))


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, the youngest first: a rank that outlives its launcher would save."""
    return [other for child in children(pid) for other in descendants(child)] + [pid]


def kill_while_writing(run: Command, folder: Path) -> bool:
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

    def typed(number: int, folder: str) -> list[str]:
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
