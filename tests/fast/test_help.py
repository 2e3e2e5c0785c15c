"""`--help` and its relatives: at once, and without torch."""

import re
import sys
import time

import pytest

from support.commands import TRAIN


@pytest.mark.parametrize("question", [["--help"], ["--cfg", "job"]], ids=" ".join)
def test_a_question_is_answered_at_once_and_without_torch(start, tmp_path, question):
    began = time.monotonic()
    answer = start(sys.executable, "-X", "importtime", TRAIN, *question).finish().output
    assert time.monotonic() - began < 3  # half a second on an idle machine
    assert not re.search(r"\|\s+torch$", answer, re.MULTILINE)
    if question == ["--help"]:
        for command in ("python src/train.py", "torchrun --standalone", "src/train.py -m launch=torchrun"):
            assert command in answer
    else:
        assert "\ntrainer:\n" in answer
    assert not list(tmp_path.glob("outputs"))
