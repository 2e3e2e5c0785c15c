"""Questions that the command answers with text: without torch, once for all ranks, and without a run folder."""

import re
import sys

import pytest

from support.commands import TORCHRUN, TRAIN


@pytest.mark.parametrize(
    ("question", "answered"),
    [
        ("--help", "torchrun --standalone --nproc_per_node=2 src/train.py"),
        ("--cfg job", "gradient_accumulation_steps: 1"),
        ("--info defaults", "scheduler/cosine"),
        ("--hydra-help", "--experimental-rerun"),
        ("--version", "Hydra 1.3"),
    ],
)
def test_a_question_is_answered_without_torch_and_leaves_nothing(start, question, answered):
    run = start(sys.executable, "-X", "importtime", TRAIN, *question.split()).finish()
    assert answered in run.output
    assert not re.search(r"\|\s+torch(vision|\.\w+)*$", run.output, re.MULTILINE)
    assert not list(run.cwd.iterdir())


@pytest.mark.parametrize(("question", "once"), [("--help", "\nLockstep: "), ("--cfg=job", "\ntrainer:\n")])
def test_two_ranks_of_torchrun_answer_once_and_help_that_nobody_reads_to_its_end_is_no_error(start, question, once):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN, question).finish()
    assert f"\n{run.output}".count(once) == 1
    cut = start("bash", "-c", f"set -o pipefail; {sys.executable} {TRAIN} {question} | head -1").finish()
    assert cut.output.count("\n") == 1
    assert not list(run.cwd.iterdir())
