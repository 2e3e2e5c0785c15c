"""`--help` and its relatives: at once, and without torch."""

import re
import resource
import sys

import pytest

from support.commands import ROOT, TRAIN


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


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries have other names")
def test_torch_s_libraries_are_loaded_before_torch_is_imported(start):
    program = """
import sys, threading
from pathlib import Path
from lockstep.cli_libraries import load_libraries
load_libraries()
for thread in threading.enumerate()[1:]:
    thread.join()
assert "torch" not in sys.modules
print("libtorch_python.so" in Path("/proc/self/maps").read_text())
"""
    assert "True" in start(sys.executable, "-c", program, PYTHONPATH=ROOT / "src").finish().output
