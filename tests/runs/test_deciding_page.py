"""docs/sweeps.md, from "Repeat each setting" on: all its commands, in its order, in a folder outside the repository."""

import re

from support.commands import ROOT
from support.pages import COMMANDS, copy_examples, environment

PAGE = (ROOT / "docs" / "sweeps.md").read_text().split("\n## Which set decides\n")[1]


def test_from_a_sweep_to_the_number_that_is_reported(tmp_path, start):
    copy_examples(PAGE, tmp_path)
    words = ("bash", "-c", "set -e\n" + "".join(COMMANDS.findall(PAGE)))
    output = start(*words, cwd=tmp_path / "lockstep", **environment(tmp_path)).finish(limit=220).output
    assert len(re.findall(r"^best: +optimizer\.lr=0\.1\d?\b", output, re.MULTILINE)) >= 2
    assert len(re.findall(r"^finished .* \(5 runs\)$", output, re.MULTILINE)) == 5
    verdicts = re.findall(r"^(?:[AB] is better by|cannot be told apart|the same: ).*$", output, re.MULTILINE)
    assert len(verdicts) == 3
    assert re.match(r"B is better by \S+ points \(\S+ to \S+\)", verdicts[0])
    assert "choosing:   val/accuracy" in output
    assert "paired by seed" in output
    assert "paired by loader.fold" in output
    assert "1437 training and 360 test samples" in output
    assert "nothing is chosen, and its number is the test's alone" in output
