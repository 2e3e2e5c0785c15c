"""Two options of two groups train a step on two ranks, or are refused in the sentence of docs/option_pairs.md."""

from pathlib import Path

import pytest

from support.commands import ROOT
from support.option_pairs import answers, pairs, row, sentence_of

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

SHARE = 30  # every thirtieth pair: `make pairs` runs all of them


def test_pairs_of_options_train_or_are_refused_as_documented(tmp_path: Path) -> None:
    documented = (ROOT / "docs" / "option_pairs.md").read_text().splitlines()
    beginnings = {line.partition(" | ")[0] for line in documented}
    for pair, answer in answers(tmp_path, pairs()[::SHARE]):
        assert answer.problem() is None, f"{' '.join(pair.words)}: {answer.problem()}\n{answer}"
        if answer.code:
            assert row(pair, sentence_of(answer)) in documented, "type: make pairs"
        else:
            assert row(pair, "").partition(" | ")[0] not in beginnings, "type: make pairs"
