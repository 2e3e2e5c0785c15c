"""The examples of docs/shards.md, copied to a folder outside the repository and run by the page's own commands."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import ROOT, Command
from support.pages import copy_examples, environment, script

PAGE = (ROOT / "docs" / "shards.md").read_text()


@pytest.mark.parametrize(
    ("heading", "samples"),
    [
        ("Tar files", "54 training, 6 validation and 20 test samples"),
        ("Validation shards of your own", "40 training, 20 validation and 20 test samples"),
        ("Text for language models", "194 training, 22 validation and 72 test samples"),
        ("JSON lines, parquet, Arrow", "54 training, 6 validation and 20 test samples"),
        ("Data sets of Hugging Face", "54 training, 6 validation and 20 test samples"),
        ("Without an index", "64 training and 23 test samples"),
    ],
)
def test_the_commands_of_a_section_train(
    tmp_path: Path, start: Callable[..., Command], heading: str, samples: str
) -> None:
    copy_examples(PAGE, tmp_path)
    words = ("bash", "-c", script(PAGE, heading))
    command = start(*words, cwd=tmp_path / "lockstep", **environment(tmp_path)).finish()
    assert samples in command.output
    is_shared = heading == "Without an index"
    assert {line.split()[1] for line in command.epochs} == ({"1/2", "2/2"} if is_shared else {"1/1"})
    assert ("is shared by its method share" in command.output) == is_shared
