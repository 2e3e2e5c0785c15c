"""Many commands in little time: a process that has imported the project forks a copy of itself for each command.

A command runs `src/train.py` as Python would, in a session and a folder of its own.
"""

import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.data import builtin
from lockstep.errors import EXIT_JOBS_FAILED
from support.commands import RANK_VARIABLES, ROOT, TRAIN

IMPORTS = (
    "lockstep.preflight",
    "lockstep.build",
    "lockstep.launchers.local",
    "lockstep.launchers.slurm",
    "lockstep.launchers.env",
    "lockstep.training.loop",
    "lockstep.training.meter",
    "lockstep.data.builtin",
    "lockstep.loggers.tensorboard",
    "lockstep.loggers.csv_logger",
    "lockstep.loggers.console",
    "tqdm",
    "lockstep.loggers.rank_logs",
    "lockstep.snapshots.resume",
    "torch.utils.tensorboard",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.multiprocessing.spawn",
)
FEW = 200  # digits that a command sees, half of them for training; all of them take a large model minutes
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    "OMP_NUM_THREADS": "1",  # a process whose threads have computed cannot fork
    "LOCKSTEP_DATA": "data",  # no data set is there, and none can be downloaded: this proxy does not answer
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}
HUNG = -1  # the exit code of a command that ran past its limit
MEMORY = 12 * 2**30  # bytes of address space beyond what the server has: a model that is too large fails at once


@dataclass(frozen=True)
class Answer:
    """How a command ended. code: its exit code, or HUNG."""

    code: int
    output: str
    seconds: float

    def __str__(self) -> str:
        return f"exit {self.code} after {self.seconds:.1f} s:\n{self.output}"

    @property
    def sentences(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("lockstep: ")]

    def problem(self) -> str | None:
        """What is wrong with this end of a command. None for a run that started, or one sentence with what to type.

        A run whose loss is not finite has started. It may end with another code, and has a sentence as well.
        """
        if self.code == HUNG:
            return "it hangs"
        if "Traceback (most recent call last)" in self.output:
            return "a traceback"
        if self.code == 0:
            return None
        if self.code == EXIT_JOBS_FAILED:  # a sweep: each of its jobs that failed has a sentence
            told = [line for line in self.sentences if re.search(r"\btype \S", line)]
            return None if self.sentences and told == self.sentences else "a job without a sentence"
        if self.code != 2 and not (self.code in (1, 3) and "not finite" in self.output):
            return f"exit code {self.code}"
        if len(self.sentences) != 1:
            return f"{len(self.sentences)} sentences"
        return None if re.search(r"\btype \S", self.sentences[0]) else "a sentence without what to type"


class CommandServer:
    """Runs commands, one at a time. Use it as a context manager."""

    def __enter__(self) -> "CommandServer":
        clean = {key: value for key, value in os.environ.items() if not key.startswith(RANK_VARIABLES)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.command_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean | ENVIRONMENT,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(30)

    def run(self, words: list[str], folder: Path, limit: float = 120, **env: str) -> Answer:
        """`python src/train.py <words>` in `folder`, killed after `limit` seconds."""
        request = {"words": words, "folder": str(folder), "limit": limit, "env": env}
        self.process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())  # type: ignore[union-attr]
        return Answer(**answer)


def _serve() -> None:
    for name in IMPORTS:
        with suppress(ImportError):  # a command that needs it reports the error
            __import__(name)
    from torchvision.datasets import cifar

    builtin.DIGITS_TO_TRAIN_ON = FEW // 2
    few = builtin._table()[:FEW].clone()
    builtin._table = lambda: few
    cifar.check_integrity = lambda *args: True  # the files that a test makes have other checksums
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


def _run(words: list[str], folder: str, limit: float, env: dict[str, str]) -> dict[str, Any]:
    output = Path(folder) / "output.txt"
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(words, folder, output, env)
    code = _wait(pid, start + limit)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the command has left behind
    text = output.read_text(errors="replace") if output.exists() else ""
    return {"code": code, "output": text, "seconds": time.monotonic() - start}


def _become(words: list[str], folder: str, output: Path, env: dict[str, str]) -> None:
    """Turn this forked process into the command. Never returns."""
    os.setsid()
    os.chdir(folder)
    with open(os.devnull) as nothing, open(output, "w") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    os.environ.update(env)
    sys.argv = [TRAIN, *words]
    try:
        runpy.run_path(TRAIN, run_name="__main__")
    finally:
        os._exit(70)  # train.py ends its process itself


def _wait(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return HUNG


if __name__ == "__main__":
    _serve()
