"""Every two options of two groups train a step on two ranks, or are refused in the sentence of docs/option_pairs.md."""

from pathlib import Path

import pytest

from support.commands import ROOT
from support.option_pairs import answers, page

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]


def test_every_pair_of_options_trains_or_is_refused_as_documented(tmp_path: Path) -> None:
    found = list(answers(tmp_path))
    problems = [f"{' '.join(pair.words)}: {answer.problem()}\n{answer}" for pair, answer in found if answer.problem()]
    assert not problems, "\n".join(problems)
    assert page(found) == (ROOT / "docs" / "option_pairs.md").read_text(), "type: make pairs"
