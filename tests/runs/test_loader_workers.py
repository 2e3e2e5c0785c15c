"""Loader workers: started once, deaf to signals that are meant for their rank, gone with it, nothing left behind."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lockstep.data.samples import EVALUATION, Key, Samples
from lockstep.data.workers import DatasetReader
from torch.utils.data._utils import signal_handling

from lockstep.data import workers
from lockstep.failures.causes import explain_exception
from support.commands import ROOT, children, wait_for

HANGS = 77

after_fork: Callable[[], None] = time.monotonic  # runs in each fork of this process, until a test replaces it
os.register_at_fork(after_in_child=lambda: after_fork())


class Readers(torch.utils.data.Dataset):
    """Sample n is n, its target the process that read it. Sample HANGS takes for ever."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == HANGS:
            time.sleep(1000)
        return index, os.getpid()


@pytest.fixture
def reader() -> Iterator[DatasetReader]:
    reader = DatasetReader(Samples(Readers()), 2, pin_memory=False)
    yield reader
    reader.close()


def meaning_of(message: str) -> tuple[str, str]:
    return explain_exception({"type": "RuntimeError", "message": message, "is_communication": False})


def keys(*batches: list[int]) -> list[list[Key]]:
    return [[(EVALUATION, number) for number in batch] for batch in batches]


def read(reader: DatasetReader, batches: list[list[int]]) -> tuple[list[list[int]], set[int]]:
    """(the samples of each batch, the processes that read them)."""
    samples, processes = [], set()
    for inputs, targets in reader.read(keys(*batches)):
        samples.append(inputs.tolist())
        processes |= set(targets.tolist())
    return samples, processes


def test_all_passes_are_read_by_the_same_workers_also_after_one_that_was_left_early(reader):
    batches = [[number, number + 1] for number in range(0, 40, 2)]
    samples, workers = read(reader, batches)
    assert samples == batches
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert next(reader.read(keys(*batches)))[0].tolist() == [0, 1]  # trainer.max_steps can end a run in mid-epoch
    assert read(reader, batches[5:]) == (batches[5:], workers)
    assert read(reader, []) == ([], set())


def test_workers_do_not_change_the_random_numbers_of_their_rank():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    reader = DatasetReader(Samples(Readers()), 1, pin_memory=False)
    read(reader, [[0]])
    reader.close()
    assert torch.equal(torch.rand(3), expected)


def test_workers_ignore_signals_that_ask_their_rank_to_stop(reader):
    _, workers = read(reader, [[0], [1]])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        for worker in workers:
            os.kill(worker, number)
    assert read(reader, [[2], [3]]) == ([[2], [3]], workers)


def test_closing_ends_a_worker_that_hangs_and_raises_nothing(reader):
    passing = reader.read(keys([0], [HANGS], [1]))
    worker = int(next(passing)[1])
    reader.close()
    assert not Path(f"/proc/{worker}").exists()
    time.sleep(0.1)  # torch's handler of SIGCHLD would raise its error here


def test_closing_raises_nothing_after_another_loader_has_installed_torchs_handler(monkeypatch):
    """torch installs it once, with the first DataLoader of the process that has workers."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    next(iter(torch.utils.data.DataLoader(Readers(), num_workers=1, multiprocessing_context="fork")))
    handler = signal.getsignal(signal.SIGCHLD)
    for _ in range(4):
        signal.signal(signal.SIGCHLD, handler)  # as the first reader found it
        reader = DatasetReader(Samples(Readers()), 2, pin_memory=False)
        read(reader, [[0], [1]])
        reader.close()
        time.sleep(0.05)
    assert signal.getsignal(signal.SIGCHLD) is not handler
    signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def test_closing_removes_the_memory_that_a_killed_worker_has_named(reader):
    """A kill in the microseconds in which torch names a tensor's memory: 13 of 700 killed workers left such a file."""
    _, processes = read(reader, [[0], [1]])
    left = [Path(f"/dev/shm/torch_{process}_1234_1") for process in (*processes, os.getpid())]
    for path in left:
        path.write_text("as torch names it")
    reader.close()
    assert [path.exists() for path in left] == [False, False, True]
    left[-1].unlink()


def test_a_worker_that_hangs_in_its_fork_is_replaced(monkeypatch):
    """Python 3.11 waits there for a lock, if a thread of torch had it. Here the fork of one of two workers waits."""
    monkeypatch.setattr(workers, "START_SECONDS", 5.0)
    rank, forks = os.getpid(), multiprocessing.Value("i", 0)
    others = children(rank)

    def hang() -> None:
        with forks.get_lock():
            forks.value += 1
            number = forks.value
        if os.getppid() == rank and number == 2:
            time.sleep(1000)

    monkeypatch.setattr(sys.modules[__name__], "after_fork", hang)
    reader = DatasetReader(Samples(Readers()), 2, pin_memory=False)
    samples, processes = read(reader, [[0], [1], [2]])
    reader.close()
    assert samples == [[0], [1], [2]]
    assert (forks.value, len(processes)) == (4, 2)
    assert children(rank) == others


def test_a_worker_that_dies_is_an_error_for_its_reader_only(reader):
    """torch raises it in a handler of signals: here while a thread starts, whose lock would stay locked."""
    passing = reader.read(keys(*([number] for number in range(40))))
    worker = int(next(passing)[1])
    os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        thread = threading.Thread(target=time.monotonic)
        thread.start()
        thread.join()
    with pytest.raises(RuntimeError, match="killed by signal"):
        list(passing)


def test_a_worker_that_dies_while_it_passes_on_a_batch_is_named(reader, monkeypatch):
    """Its connection can end before its process does."""
    monkeypatch.setattr(workers, "END_SECONDS", 30.0)
    passing = reader.read(keys([0], [HANGS]))
    worker = int(next(passing)[1])
    (hanging,) = {process.pid for process in reader._workers} - {worker}

    def end_early(timeout: float = 1) -> None:
        os.kill(hanging, signal.SIGKILL)
        raise ConnectionResetError("its connection ended")

    monkeypatch.setattr(reader._loader._iterator, "_try_get_data", end_early)
    with pytest.raises(RuntimeError) as caught:
        next(passing)
    assert meaning_of(str(caught.value))[0] == "a process that loads data has ended"


def test_a_worker_that_dies_while_its_reader_waits_for_it_is_noticed_at_once(reader):
    passing = reader.read(keys([0], [HANGS]))
    worker = int(next(passing)[1])
    (hanging,) = {process.pid for process in reader._workers} - {worker}
    timer = threading.Timer(0.5, os.kill, (hanging, signal.SIGKILL))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="killed by signal|exited unexpectedly"):
        next(passing)
    assert time.monotonic() - begin < 4.5  # torch itself looks every 5 s


def test_other_ranks_notice_that_a_rank_has_closed_its_connection_to_them(tmp_path):
    here, there = socket.socketpair()
    os.mkfifo(tmp_path / "pipe")
    arrivals = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    departures = os.open(tmp_path / "pipe", os.O_WRONLY)
    reader = DatasetReader(Samples(Readers()), 1, pin_memory=False)
    assert len(read(reader, [[0]])[1]) == 1
    here.close()
    os.close(departures)
    there.settimeout(5)
    assert there.recv(1) == b""
    assert os.read(arrivals, 1) == b""
    there.close()
    os.close(arrivals)
    reader.close()


def test_workers_leave_no_file_behind_even_when_they_are_killed(tmp_path):
    code = """if True:
        from lockstep.data.samples import Samples
        from lockstep.data.workers import DatasetReader
        from support.own_data import Points
        reader = DatasetReader(Samples(Points()), 2, pin_memory=False)
        for _ in reader.read([[(0, 0)], [(0, 1)], [(0, 2)]]):  # its tensors arrive through shared memory
            pass
        reader.close()  # kills them
    """
    run_python(code, TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm")
def test_shared_memory_that_is_full_is_not_taken_for_a_full_disk():
    code = """if True:
        import subprocess, torch
        from lockstep.data.samples import Samples
        from lockstep.data.workers import DatasetReader
        class Large(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return torch.zeros(2**20), index
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
        for _ in DatasetReader(Samples(Large()), 1, pin_memory=False).read([[(0, 0)], [(0, 1)]]):
            pass
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = ["unshare", "--mount", sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True, check=False)
    meaning, advice = meaning_of(run.stderr.strip().splitlines()[-1])
    assert "/dev/shm, is full" in meaning
    assert advice.endswith("or type loader.num_workers=0")


def _hang_in_a_worker(answer: Any) -> None:
    reader = DatasetReader(Samples(Readers()), 2, pin_memory=False)
    answer.put(children(os.getpid()))
    read(reader, [[HANGS], [HANGS]])


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_hang_end_with_a_rank_that_is_killed(method):
    context = multiprocessing.get_context(method)
    answer = context.SimpleQueue()
    rank = context.Process(target=_hang_in_a_worker, args=[answer])
    rank.start()
    workers = answer.get()
    assert len(workers) >= 2
    rank.kill()
    rank.join()
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), "end of the workers", 20)


def test_python_ends_at_once_with_a_loader_that_was_not_closed() -> None:
    """As in a notebook: the workers ignore the SIGTERM that multiprocessing sends them before it waits for them."""
    code = """if True:
        import torch
        from lockstep.data.loader import BatchLoader, Converter
        from support.own_data import Points
        loader = BatchLoader(Points(), Converter(torch.device("cpu")), workers=1)
        print(len(list(loader.eval_batches(4))))
    """
    run_python(code)


def run_python(code: str, **variables: str) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path} | variables
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
