"""One run per folder: the lock, and the record of the config in `.hydra`, which belongs to whoever holds the lock."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

from lockstep.distributed.run_folder import HeldFolder
from support.commands import wait_for


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
