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


def _train_with_records(cfg: Any, files: list[dict[str, str]]) -> list[str]:
    """A training for each (files to record), in one rank, each a step longer. Returns how each was refused."""
    sentences = []
    for steps, recorded in enumerate(files, start=1):
        changed = cfg.changed({"trainer.max_steps": steps})
        try:
            Train().work(changed, replace(record_of(changed), files=recorded), parts_of(changed))
            sentences.append("")
        except ConfigError as error:
            sentences.append(str(error))
    return sentences


def test_the_record_of_a_run_belongs_to_the_run_that_holds_the_folder(tmp_path):
    cfg = composed(f"run_dir={tmp_path}", *SMALL)
    first, second = ({"config.yaml": text, "overrides.yaml": "[]"} for text in ("first", "second"))
    other = HeldFolder(tmp_path)
    assert other.lock() is None  # as another run would hold it
    ((refusal,),) = in_world(1, _train_with_records, cfg, [first])
    assert refusal.startswith(f"another run holds {tmp_path} (pid {os.getpid()} on ")
    assert refusal.endswith("wait for its end, or type hydra.run.dir=<another folder>")
    assert not (tmp_path / ".hydra").exists()
    other.release()
    assert in_world(1, _train_with_records, cfg, [first, second]) == [["", ""]]
    assert {path.name: path.read_text() for path in (tmp_path / ".hydra").iterdir()} == second


def _hold_and_fork(folder: str) -> None:
    """Takes the lock and forks a process, as a DataLoader does for its workers."""
    held = HeldFolder(Path(folder))
    assert held.lock() is None
    if (child := os.fork()) != 0:
        Path(folder, "worker").write_text(str(child))
        Path(folder, "worker").rename(Path(folder, "worker.pid"))
    time.sleep(60)
    os._exit(0)


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_rank(tmp_path):
    rank = multiprocessing.get_context("forkserver").Process(target=_hold_and_fork, args=[str(tmp_path)])
    rank.start()
    wait_for(lambda: (tmp_path / "worker.pid").exists(), "forked worker")
    worker = int((tmp_path / "worker.pid").read_text())
    try:
        assert str(HeldFolder(tmp_path).lock()).startswith(f"another run holds {tmp_path} (pid {rank.pid} on ")
        rank.kill()
        rank.join()
        assert Path(f"/proc/{worker}").exists()
        assert HeldFolder(tmp_path).lock() is None
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch, caplog):
    """Lustre that is mounted without flock."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert HeldFolder(tmp_path).lock() is None
    assert "cannot be locked (Function not implemented)" in caplog.text
