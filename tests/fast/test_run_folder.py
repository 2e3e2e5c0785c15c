"""One run per folder: the lock, and the record of the config in `.hydra`, which belongs to whoever holds the lock."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.distributed.run_folder import HeldFolder
from lockstep.errors import ConfigError
from lockstep.modes.train import Train
from support.commands import wait_for
from support.configs import composed, parts_of, record_of
from support.digits import FEW
from support.worlds import in_world

SMALL = ["model=mlp", "logger=[]", "model.width=16", FEW, "trainer.max_steps=1"]


def _train_with_records(cfg: Any, jobs: list[tuple[dict[str, Any], dict[str, str]]]) -> list[str]:
    """A training for each (changes of trainer.*, files to record), in one rank. Returns how each was refused."""
    sentences = []
    for changes, files in jobs:
        cfg = cfg.changed({f"trainer.{name}": value for name, value in changes.items()})
        try:
            Train().work(cfg, replace(record_of(cfg), files=files), parts_of(cfg))
            sentences.append("")
        except ConfigError as error:
            sentences.append(str(error))
    return sentences


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_record_of_a_run_belongs_to_the_run_that_holds_the_folder(tmp_path):
    cfg = composed(f"run_dir={tmp_path}", *SMALL)
    hydra = tmp_path / ".hydra"
    first = {"config.yaml": "first", "overrides.yaml": "[]"}
    assert in_world(1, _train_with_records, cfg, [({}, first)]) == [[""]]
    assert contents(hydra) == first

    held_folder = HeldFolder(tmp_path)
    assert held_folder.lock() is None  # as another run would hold it
    second = {"config.yaml": "second", "overrides.yaml": "[]"}
    ((refusal,),) = in_world(1, _train_with_records, cfg, [({"max_steps": 2}, second)])
    held = f"another run holds {tmp_path} (pid {os.getpid()} on "
    assert refusal.startswith(held)
    assert refusal.endswith("wait for its end, or type hydra.run.dir=<another folder>")
    assert contents(hydra) == first
    held_folder.release()

    # The last start has nothing to train.
    jobs = [({"max_steps": 3}, second), ({"max_steps": 2}, {"config.yaml": "third"})]
    assert in_world(1, _train_with_records, cfg, jobs) == [["", ""]]
    assert contents(hydra) == second


def _hold_and_fork(folder: str) -> None:
    """Takes the lock and forks a process, as a DataLoader does for its workers."""
    held = HeldFolder(Path(folder))
    assert held.lock() is None
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    Path(folder, "worker").write_text(str(child))
    Path(folder, "worker").rename(Path(folder, "worker.pid"))
    time.sleep(60)


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_rank(tmp_path):
    rank = multiprocessing.get_context("forkserver").Process(target=_hold_and_fork, args=[str(tmp_path)])
    rank.start()
    wait_for(lambda: (tmp_path / "worker.pid").exists(), "forked worker")
    worker = int((tmp_path / "worker.pid").read_text())
    try:
        problem = HeldFolder(tmp_path).lock()
        assert str(problem).startswith(f"another run holds {tmp_path} (pid {rank.pid} on ")
        rank.kill()
        rank.join()
        assert Path(f"/proc/{worker}").exists()
        held = HeldFolder(tmp_path)
        assert held.lock() is None
        held.release()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch, caplog):
    """Lustre that is mounted without flock."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert HeldFolder(tmp_path).lock() is None
    assert "cannot be locked (Function not implemented)" in caplog.text
