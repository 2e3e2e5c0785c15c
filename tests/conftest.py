"""Fixtures that start commands."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from support.commands import TRAIN, WHOLE, Command
from support.forked import share_server
from support.traces import FILES, OF_WORLDS, Traces

# Several tests run at once, and threads take the cores from each other: these small nets take twice the CPU time on two
# threads. Where there are more they sleep while they wait: on two busy cores spinning took three to six times the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The semaphores of worlds stay until pytest ends. Tests of what a command leaves in /dev/shm know them by their names.
multiprocessing.current_process()._config["semprefix"] = f"/{OF_WORLDS}"

# In the background of a shell SIGINT is ignored, and the commands of tests would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The longest files, those of drills and those of `make test`, by their seconds. They run first, so that no core is
# idle while another one runs the last of them.
LONG = "test_same_numbers test_zoo test_slurm_jobs test_hangs test_faults test_kills test_bench test_promise "
LONG += "test_pages test_pretended_gpus test_own_work test_every_data_set test_python_api test_resume test_starters"


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None) and config.args != ["tests/fast"]:
        share_server()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """Mark the tests in which something is broken on purpose, and put the longest files first."""
    files = LONG.split()
    items.sort(key=lambda item: files.index(item.path.stem) if item.path.stem in files else len(files))
    for item in items:
        if item.path.stem in FILES.split():
            item.add_marker("fault")


@pytest.fixture(autouse=True)
def seed():
    """Tensors of a test are alike in every run of it: no test fails once in three hundred runs by its values."""
    torch.manual_seed(0)


@pytest.fixture
def start(tmp_path, request):
    """start(*words, **environment) -> a running Command, in an empty folder."""
    started = []
    new_process = request.node.get_closest_marker("new_process") is not None
    is_whole = request.node.get_closest_marker("whole") is not None

    def start_command(*words, cwd=tmp_path, **env):
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
def short_folder():
    """A Unix socket in a folder of pytest's would have too long a path."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def start_faulty(start):
    """As start, for a command that the test breaks: it leaves no process and no file."""
    watched = []

    def start_command(*words, **env):
        traces = Traces()
        watched.append((start(*words, **traces.environment | env), traces))
        return watched[-1][0]

    yield start_command
    left = [traces.left(command) for command, traces in watched]
    assert not any(left), f"processes that are alive, and files in TMPDIR and /dev/shm: {left}"


@pytest.fixture
def train(start):
    """train(*overrides, code=0, **environment) -> a finished `python src/train.py`."""

    def train_command(*overrides, code=0, **env):
        return start(sys.executable, TRAIN, *overrides, **env).finish(code)

    return train_command
