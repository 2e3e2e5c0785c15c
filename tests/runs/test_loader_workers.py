"""Loader workers: deaf to signals that are meant for their rank, gone with it, nothing left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lockstep.data.reader import SampleReader, batches, request_of
from lockstep.failures.explain import explain_exception
from support.commands import ROOT, children, wait_for

HANGS = 77


class Readers(torch.utils.data.Dataset):
    """Sample n is n, its target the process that read it. Sample HANGS takes for ever."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == HANGS:
            time.sleep(1000)
        return index, os.getpid()


def passing(numbers, workers=2):
    requests = [request_of(batch) for batch in numbers]
    return batches(SampleReader(Readers(), "data", 0), requests, workers, pin_memory=False)


def meaning_of(message):
    return explain_exception({"type": "RuntimeError", "message": message, "is_echo": False})


def test_batches_come_in_order_from_all_workers_which_ignore_signals_and_end_with_them():
    before = children(os.getpid())
    wanted = [[number, number + 1] for number in range(0, 40, 2)]
    reading = passing(wanted)
    found = [next(reading) for _ in range(2)]
    workers = {int(process) for _, targets in found for process in targets}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # they ask their rank to stop
        for worker in workers:
            os.kill(worker, number)
    found += reading
    assert [inputs.tolist() for inputs, _ in found] == wanted
    assert {int(process) for _, targets in found for process in targets} == workers
    assert len(workers - {os.getpid()}) == 2
    early = passing(wanted)
    next(early)  # trainer.max_steps can end a run in mid-epoch
    del early
    assert children(os.getpid()) == before


def test_a_worker_that_dies_is_an_error_that_is_explained():
    before = multiprocessing.active_children()  # of other tests in this process
    found = passing([[0], [HANGS], [1]])
    reads = int(next(found)[1])
    started = {process.pid for process in multiprocessing.active_children() if process not in before}
    (hanging,) = started - {reads}
    os.kill(hanging, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="killed by signal|exited unexpectedly") as caught:
        next(found)
    assert time.monotonic() - begin < 20  # torch looks every 5 s
    assert meaning_of(str(caught.value))[0] == "a process that loads data has ended"


FULL = """
import subprocess, torch
from lockstep.data.reader import SampleReader, batches, request_of
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return torch.zeros(2**20), index
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
list(batches(SampleReader(Data(), "data", 0), [request_of([number], 0) for number in range(9)], 1, False))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm")
def test_shared_memory_that_is_full_is_not_taken_for_a_full_disk():
    command, env = ["unshare", "--mount", sys.executable, "-c", FULL], os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(command, env=env, timeout=60, capture_output=True, text=True)
    meaning, advice = meaning_of(ended.stderr.strip().splitlines()[-1])
    assert "/dev/shm, is full" in meaning
    assert advice.endswith("or type loader.num_workers=0")


def _hang_in_a_worker(answer):
    found = passing([[0], [1], [HANGS], [HANGS]])
    next(found)
    answer.put([process.pid for process in multiprocessing.active_children()])
    list(found)


def test_workers_that_hang_end_with_a_rank_that_is_killed():
    context = multiprocessing.get_context("forkserver")
    answer = context.SimpleQueue()
    rank = context.Process(target=_hang_in_a_worker, args=[answer])
    rank.start()
    workers = answer.get()
    assert len(workers) == 2
    rank.kill()
    rank.join()
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), "end of the workers", 20)
