"""Questions that the command answers with text: without torch, once for all ranks, and without a run folder."""

import re
import sys

import pytest

from support.commands import TORCHRUN, TRAIN


@pytest.mark.parametrize(
    ("question", "answered"),
    [
        (["--help"], "torchrun --standalone --nproc_per_node=2 src/train.py"),
        (["--cfg", "job"], "gradient_accumulation_steps: 1"),
        (["--info", "defaults"], "scheduler/cosine"),
        (["--hydra-help"], "--experimental-rerun"),
        (["--version"], "Hydra 1.3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_question_is_answered_without_torch_and_leaves_nothing(start, question, answered):
    run = start(sys.executable, "-X", "importtime", TRAIN, *question).finish()
    assert answered in run.output
    assert not re.search(r"\|\s+torch(vision|\.\w+)*$", run.output, re.MULTILINE)
    assert not list(run.cwd.iterdir())


@pytest.mark.parametrize(("question", "once"), [("--help", "\nLockstep: "), ("--cfg=job", "\ntrainer:\n")])
def test_two_ranks_of_torchrun_answer_once(start, question, once):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, question).finish()
    assert f"\n{run.output}".count(once) == 1
    assert not list(run.cwd.iterdir())


def test_help_that_nobody_reads_to_its_end_is_no_error(start):
    script = f"set -o pipefail; {sys.executable} {TRAIN} --help | head -1"
    run = start("bash", "-c", script).finish()
    assert run.output.count("\n") == 1
