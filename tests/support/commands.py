"""Real commands in real processes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from support.forked import SHARED, ForkedProcess, can_be_forked

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "src" / "train.py")
PYTHON_TRAIN = [sys.executable, TRAIN]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WHOLE = ["loader.validation=null", "evaluation.test=every"]  # nothing is held out, and each epoch is tested
ON_TEST = "dataset._target_=support.digits.OnTest"  # all digits are trained on, and each rank knows the objective
BY_LOSS = "task._target_=support.models.ByLoss"  # of all tasks the one whose loss is the objective
TIMEOUT = 150  # seconds for a command to end
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "GROUP_RANK")
RANK_VARIABLES += (SHARED,)  # pytest in a command has a server of its own


def own_data(target):
    """Words for data of a class or function `target` that takes `train`."""
    nodes = [f"+dataset.{half}={{_target_: {target}, train: {half == 'train'}}}" for half in ("train", "test")]
    return ["dataset=pair", *nodes]


def without_ranks(environment):
    """An environment without what says that a process is a rank."""
    return {key: value for key, value in environment.items() if not key.startswith(RANK_VARIABLES)}


class Command:
    """A started command. `finish` waits for it, and fails the test with its whole output if the exit code is wrong.

    A command finds the modules of tests, behind those of its own PYTHONPATH.
    new_process: whether `python src/train.py` is started anew and not forked, see support.forked.
    """

    def __init__(self, command, cwd, new_process=False, **env):
        paths = [str(path) for path in (env.get("PYTHONPATH"), ROOT / "tests") if path]
        clean, env = without_ranks(os.environ), env | {"PYTHONPATH": os.pathsep.join(paths)}
        self.command, self.cwd, self.output = [str(word) for word in command], Path(cwd), ""
        self.temporary = Path(str(env.get("TMPDIR", tempfile.gettempdir())))
        own = {key: str(value) for key, value in env.items()}
        if not new_process and can_be_forked(self.command, own):
            self.process = ForkedProcess(self.command, self.cwd, clean | own)
            return
        self.process = subprocess.Popen(
            self.command,
            cwd=cwd,
            env=clean | own,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def finish(self, code=0, limit=TIMEOUT):
        try:
            self.output, _ = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.kill_group()
            self.output, _ = self.process.communicate()
            pytest.fail(f"{' '.join(self.command)} still ran after {limit} s:\n{self.output}")
        if code is not None:
            failure = f"{' '.join(self.command)} ended with {self.process.returncode}:\n{self.output}"
            assert self.process.returncode == code, failure
        return self

    def send(self, number, to="launcher"):
        """Send a signal to the "launcher" alone, or to its "group", as a terminal does."""
        (os.killpg if to == "group" else os.kill)(self.process.pid, number)

    def remove_folders(self):
        """The temporary folders of a launcher and ranks that were all killed at once: nobody is left to do it."""
        for folder in [*self.temporary.glob("pymp-*"), *self.temporary.glob("lockstep-*")]:
            shutil.rmtree(folder, ignore_errors=True)

    def kill_group(self):
        os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def epochs(self):
        """The epochs' lines without their speed."""
        lines = [line for line in self.output.splitlines() if line.startswith("epoch ")]
        return [re.sub(r"\s+\d+ (samples|tokens)/s", "", line) for line in lines]

    @property
    def sentence(self):
        """The one line that says why the command was refused."""
        assert "Error executing job" not in self.output  # Hydra's line with all overrides
        (line,) = [line for line in self.output.splitlines() if line.startswith("lockstep: ")]
        return line

    @property
    def folder(self):
        """The one run folder under outputs/."""
        (folder,) = [path.parent for path in self.cwd.glob("outputs/*/*/train.log")]
        return folder


def wait_for(condition, what, limit=60):
    """Wait until `condition()` is true. Fails the test after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {limit} s"
        time.sleep(0.02)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def ranks_under(launcher):
    """The rank processes of one of our launchers: a forked one has the command line of its parent."""
    own = command_line(launcher)
    return [pid for pid in children(launcher) if b"spawn_main" in command_line(pid) or command_line(pid) == own]


def ranks_of_torchrun(agent):
    """The rank processes of torchrun, which is a process of its own."""
    return sorted(pid for pid in children(agent) if b"train.py" in command_line(pid))


# The ways to start two ranks, and a plain start of one.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, TRAIN]
STARTERS = {
    "torchrun": [*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN],
    "launch=torchrun": [*PYTHON_TRAIN, "launch=torchrun"],
    "launch=spawn": [*PYTHON_TRAIN, "launch=spawn"],
    "launch=fork": [*PYTHON_TRAIN, "launch=fork"],
    "python": PYTHON_TRAIN,
}
LAUNCHERS = STARTERS | {"mpirun": MPIRUN}


def skip_without_mpirun(launcher):
    """Skip the test of `launcher` if it is mpirun and this machine lacks it."""
    if launcher == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("needs mpirun: apt-get install openmpi-bin")


def processes_of(session):
    """The processes of a command, which is the first of its session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def ema(decay):
    """What one types for an average of the weights."""
    return f"trainer.ema={{_target_: lockstep.training.ema.Average, decay: {decay}}}"
