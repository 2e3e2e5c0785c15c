"""Many commands in little time: `python src/train.py` in a forked process, with few digits and little memory."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.data.source import Splits, Tensors
from lockstep.data.vision import Digits
from support.commands import ROOT, TRAIN, without_ranks
from support.forked import ForkedProcess

FEW = 200  # digits that a command sees, half of them for training; all of them take a large model minutes
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    "OMP_NUM_THREADS": "1",
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

    def __str__(self):
        return f"exit {self.code} after {self.seconds:.1f} s:\n{self.output}"

    @property
    def sentences(self):
        return [line for line in self.output.splitlines() if line.startswith("lockstep: ")]

    def problem(self):
        """What is wrong with this end of a command. None for a run that started, or one sentence with what to type.

        A run whose loss is not finite has started. It may end with another code, and has a sentence as well.
        """
        if self.code == HUNG:
            return "it hangs"
        if "Traceback (most recent call last)" in self.output:
            return "a traceback"
        if self.code == 0:
            return None
        if self.code == 1 and re.search(r"^promise .*^.+ no  +\S", self.output, re.DOTALL | re.MULTILINE):
            return None  # mode=check ran, and its table says which promise does not hold
        if self.code == 1 and "what it means: an index is larger than the table" in self.output:
            return None  # of a net with fewer outputs than there are classes: the report of the first step tells
        if self.code == 1 and re.search(r"^sweep: .*(failed|refused)", self.output, re.MULTILINE):
            told = [line for line in self.sentences if re.search(r"\btype \S", line)]
            return None if self.sentences and told == self.sentences else "a job without a sentence"
        if self.code != 2 and not (self.code == 1 and "not finite" in self.output):
            return f"exit code {self.code}"
        if "train.py: error: " in self.output:  # argparse's, for a wrong flag
            return None
        if len(self.sentences) != 1:
            return f"{len(self.sentences)} sentences"
        return None if re.search(r"\btype \S", self.sentences[0]) else "a sentence without what to type"


def answer_of(words, folder, limit=120, **env):
    """`python src/train.py <words>` in `folder`, killed after `limit` seconds, and what it has left behind, too."""
    start = time.monotonic()
    command = [sys.executable, TRAIN, *words]
    process = ForkedProcess(command, folder, without_ranks(os.environ) | ENVIRONMENT | env, prepared_by=__name__)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(limit)
    code = process.poll()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return Answer(HUNG if code is None else code, output, time.monotonic() - start)


def prepare():
    """In the server, before it forks the commands."""
    from torchvision.datasets import cifar

    torch.set_num_threads(1)  # a process whose threads have computed cannot fork
    train = Digits().splits().train
    halves = [Tensors(train.inputs[part], train.targets[part]) for part in (slice(FEW // 2), slice(FEW // 2, FEW))]
    Digits.splits = lambda self: Splits(*halves)
    cifar.check_integrity = lambda *args: True  # the files that a test makes have other checksums
    os.register_at_fork(after_in_child=_limit_memory)


def _limit_memory():
    if resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:  # a rank, which has its command's limit
        return
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
