"""Two ranks without torch, as processes that are forked from this program: they hang, or fail and tell of it.

python lone_ranks.py <folder> <what rank 1 does>
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from lockstep.errors import ConfigError, RankFailed, exit_code_of
from lockstep.failures.record import heartbeat
from lockstep.failures.report import failures_in, make_report, screen
from lockstep.failures.watchdog import Watchdog
from lockstep.launchers.env import EnvLauncher
from lockstep.source_code import PROJECT

COMMAND = ["python", "src/train.py"]


def sleeps() -> None:
    time.sleep(100)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)


def holds_the_lock() -> None:
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def computes() -> None:
    while time.monotonic():
        sum(range(10000))


HANGS: dict[str, Callable[[], None]] = {one.__name__: one for one in (sleeps, is_stopped, holds_the_lock, computes)}


def share(folder: Path, rank: int) -> dict[int, int]:
    """Share the folder with the other rank. Returns the pids."""
    heartbeat.begin(rank, 2)
    ranks = folder / "ranks"
    ranks.mkdir(exist_ok=True)
    heartbeat.share(ranks)
    heartbeat.note(run_dir=str(folder), log=str(folder / f"rank{rank}.log"))
    while len([*ranks.glob("*.json")]) < 2:
        time.sleep(0.01)
    time.sleep(0.1)
    heartbeat.enter("train", lambda: [1, 2, 3], 1)
    heartbeat.step_ended(1, 5)
    return {number: json.loads((ranks / f"rank{number}.json").read_text())["pid"] for number in (0, 1)}


def hang(folder: Path, rank: int, what: str) -> None:
    world = SimpleNamespace(here=share(folder, rank), rank=rank, size=2, machines=[0], timeout=300.0)
    watchdog = Watchdog(world, lambda: None, 2.0, "stop", None)
    watchdog.look(time.monotonic())
    for step in (6, 7):
        heartbeat.step_ended(1, step)
        watchdog.look(time.monotonic())

    def look() -> None:
        while True:
            time.sleep(1)
            watchdog.look(time.monotonic())

    threading.Thread(target=look, daemon=True).start()
    if rank == 1:
        HANGS[what]()
    heartbeat.sums(1000)  # rank 0 waits for rank 1
    time.sleep(100)


def fail(folder: Path, rank: int, what: str) -> None:
    """As a worker of launch=env."""
    share(folder, rank)
    errors = {"raises": ValueError("a mistake"), "is refused": ConfigError("x=1 is wrong; type x=2")}
    with heartbeat.recording():
        if rank == 1 and what == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and what == "leaves":
            os._exit(3)
        if rank == 1 and what in errors:
            raise errors[what]
        if what != "ends well":  # rank 0 loses its connection
            time.sleep(0.05)
            lost: dict[str, Callable[[], None]] = {}
            code = "def lose():\n    raise ConnectionError('rank 1 is gone')\n"
            exec(compile(code, str(PROJECT / "distributed/shared_memory.py"), "exec"), lost)
            lost["lose"]()


def become(folder: Path, rank: int, what: str) -> int:
    """Returns the exit code."""
    if what in HANGS:
        hang(folder, rank, what)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_PORT="1")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error{rank}.json")
    try:
        EnvLauncher().launch(fail, folder, rank, what)
    except RankFailed as error:
        if str(error):
            print(f"rank {rank} tells:\n{error}", flush=True)
        return exit_code_of(error)
    except ConfigError as error:
        print(f"rank {rank} tells: {error}", flush=True)
        return exit_code_of(error)
    return 0


def main(folder: Path, what: str) -> None:
    """Prints what the ranks say, and {rank: exit code}; after a hang the report. A hang may last 40 s."""
    pids = {}
    for rank in (0, 1):
        if (pid := os.fork()) == 0:
            os._exit(become(folder, rank, what))
        pids[pid] = rank
    codes: dict[int, int] = {}
    if what not in HANGS:
        time.sleep(2)  # as a starter that looks now and then
    deadline = time.monotonic() + (10 if what == "computes" else 40)  # the first goes on
    while len(codes) < 2 and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    report = make_report(failures_in(folder / "ranks", {}), COMMAND) if what in HANGS else None
    if report is not None:
        print(screen(report))
    print(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
