"""How the tests start things: the real command in real processes, or a function in a small gloo world."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.rendezvous import free_port

ROOT = Path(__file__).parents[1]
TRAIN = str(ROOT / "src" / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SHORT = ["trainer.epochs=2", "sync_bn=on"]
LIMIT = 150  # seconds that any launched world may take


class Command:
    """A started command. `finish` waits for it and fails the test, with the whole output, where it was to succeed."""

    def __init__(self, command, cwd, **env):
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_"))
        }
        self.command, self.cwd = [str(word) for word in command], Path(cwd)
        self.process = subprocess.Popen(
            self.command, cwd=cwd, env=clean | {key: str(value) for key, value in env.items()}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def finish(self, code=0):
        try:
            self.output, _ = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.output, _ = self.process.communicate()
            pytest.fail(f"{' '.join(self.command)} still ran after {LIMIT} s:\n{self.output}")
        if code is not None:
            assert self.process.returncode == code, f"{' '.join(self.command)} ended with {self.process.returncode}:\n{self.output}"
        return self

    @property
    def epochs(self):
        """The epochs' lines without their speed."""
        return [re.sub(r"\s+\d+ samples/s", "", line) for line in self.output.splitlines() if line.startswith("epoch ")]

    @property
    def folder(self):
        """The one run folder under outputs/."""
        (folder,) = [path.parent for path in self.cwd.glob("outputs/*/*/train.log")]
        return folder


@pytest.fixture
def start(tmp_path):
    """start(words, **environment) -> a Command under way in an empty folder."""
    started = []

    def start(*command, **env):
        started.append(Command(command, env.pop("cwd", tmp_path), **env))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()


@pytest.fixture
def train(start):
    """train(overrides, **environment) -> a finished `python src/train.py`."""
    return lambda *overrides, code=0, **env: start(sys.executable, TRAIN, *overrides, **env).finish(code)


def wait_for(condition, what, limit=60):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {limit} s"
        time.sleep(0.02)


def in_world(size, function, *args, limit=LIMIT):
    """[function(*args) as rank r of a gloo world, for each r]: real processes, forked from a server that has torch loaded.

    They may take `limit` seconds together.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.pipelining", "hydra"]
    )
    port, results = free_port(), context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, size, port, results, function, args)) for rank in range(size)]
    for process in processes:
        process.start()
    answers, deadline = {}, time.monotonic() + limit
    try:
        while len(answers) < size:
            if not results.empty():
                answers.update([results.get()])
                continue
            failed = [process.exitcode for process in processes if process.exitcode]
            assert not failed, f"a rank ended with {failed[0]}"
            assert time.monotonic() < deadline, f"a world of {size} still ran after {limit} s"
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [answers[rank] for rank in range(size)]


def _rank(rank, size, port, results, function, args):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    results.put((rank, function(*args)))
    os._exit(0)


def events(folder):
    """{tag: [(step, value), ...]} of a run folder, read as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
