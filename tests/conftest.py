"""Fixtures that start commands."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from support.commands import TRAIN, WHOLE, Command
from support.traces import FILES, OF_WORLDS, Traces

# Threads of OpenMP sleep while they wait for each other. Several tests run at once, and threads that spin would take
# the cores from each other: on two busy cores a training of one process took three to six times its CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The semaphores of worlds stay until pytest ends. Tests of what a command leaves in /dev/shm know them by their names.
multiprocessing.current_process()._config["semprefix"] = f"/{OF_WORLDS}"

# In the background of a shell SIGINT is ignored, and the commands of tests would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The longest files, those of drills and those of `make test`, by their seconds. They run first, so that no core is
# idle while another one runs the last of them.
LONG = "test_same_numbers test_zoo test_slurm_jobs test_hangs test_faults test_kills test_bench test_promise "
LONG += "test_pretended_gpus test_pages test_own_work test_sweeps test_modes test_every_data_set"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in which something is broken on purpose, and put the longest files first."""
    files = LONG.split()
    items.sort(key=lambda item: files.index(item.path.stem) if item.path.stem in files else len(files))
    for item in items:
        if item.path.stem in FILES.split():
            item.add_marker("fault")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Tensors of a test are alike in every run of it: no test fails once in three hundred runs by its values."""
    torch.manual_seed(0)


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Command]]:
    """start(*words, **environment) -> a running Command, in an empty folder."""
    started: list[Command] = []
    new_process = request.node.get_closest_marker("new_process") is not None
    is_whole = request.node.get_closest_marker("whole") is not None

    def start_command(*words: str, cwd: Path = tmp_path, **env: object) -> Command:
        if is_whole and TRAIN in words:  # what is typed may say otherwise
            place = words.index(TRAIN) + 1
            # Data with a validation split, or those of a trained run.
            has_own = any(word.endswith("OnTest") or word.startswith("mode=") for word in words)
            words = (*words[:place], *WHOLE[has_own:], *words[place:])
        started.append(Command(list(words), cwd, new_process, **env))
        return started[-1]

    yield start_command
    for command in started:
        if command.process.poll() is None:
            command.kill_group()
            command.process.wait()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A Unix socket in a folder of pytest's would have too long a path."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def start_faulty(start: Callable[..., Command]) -> Iterator[Callable[..., Command]]:
    """As start, for a command that the test breaks: it leaves no process and no file."""
    watched: list[tuple[Command, Traces]] = []

    def start_command(*words: str, **env: object) -> Command:
        traces = Traces()
        watched.append((start(*words, **traces.environment | env), traces))
        return watched[-1][0]

    yield start_command
    left = [traces.left(command) for command, traces in watched]
    assert not any(left), f"processes that are alive, and files in TMPDIR and /dev/shm: {left}"


@pytest.fixture
def train(start: Callable[..., Command]) -> Callable[..., Command]:
    """train(*overrides, code=0, **environment) -> a finished `python src/train.py`."""

    def train_command(*overrides: str, code: int | None = 0, **env: object) -> Command:
        return start(sys.executable, TRAIN, *overrides, **env).finish(code)

    return train_command
