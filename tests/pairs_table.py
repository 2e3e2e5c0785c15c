"""`make pairs`: runs every pair of options, writes docs/option_pairs.md, and fails if one neither runs nor says why."""

import sys
import tempfile
from pathlib import Path

from support.commands import ROOT
from support.option_pairs import answers, page, pairs


def main() -> None:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for pair, answer in answers(Path(folder), pairs(), at_once=2):
            found.append((pair, answer))
            if answer.problem():
                print(f"{' '.join(pair.words)}: {answer.problem()}\n{answer}", flush=True)
    (ROOT / "docs" / "option_pairs.md").write_text(page(found))
    sys.exit(any(answer.problem() for _, answer in found))


if __name__ == "__main__":
    main()
