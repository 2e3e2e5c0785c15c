"""`--help` and its relatives: at once, and without torch."""

import re
import resource
import sys

import pytest

from support.commands import TRAIN


@pytest.mark.parametrize("question", [["--help"], ["--cfg", "job"]], ids=" ".join)
def test_a_question_is_answered_at_once_and_without_torch(start, tmp_path, question):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = start(sys.executable, "-X", "importtime", TRAIN, *question).finish().output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2  # 0.4 s on an idle machine
    assert not re.search(r"\|\s+torch$", answer, re.MULTILINE)
    if question == ["--help"]:
        for command in ("python src/train.py", "torchrun --standalone", "src/train.py -m launch=torchrun"):
            assert command in answer
    else:
        assert "\ntrainer:\n" in answer
    assert not list(tmp_path.glob("outputs"))
