"""The examples of docs/data.md, copied to a folder outside the repository and run by the page's own commands."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from support.commands import ROOT, Command
from support.pages import copy_examples, environment, script

PAGE = (ROOT / "docs" / "data.md").read_text()


@pytest.fixture
def run(tmp_path: Path, start: Callable[..., Command]) -> Callable[[str], Command]:
    """run(heading) -> the finished commands of that section, typed as the page prints them."""
    copy_examples(PAGE, tmp_path)
    for number in range(8):
        for split in ("train", "val"):
            path = tmp_path / "pictures" / split / ("dark", "light")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (20, 18), 40 + 150 * (number % 2)).save(path)
    (tmp_path / "pets" / "photos").mkdir(parents=True)
    lines = ["file,breed,age,split"]
    for number in range(12):
        name, split = f"photos/{number}.png", ("train", "test")[number // 8]
        lines.append(f"{name},{('beagle', 'poodle')[number % 2]},{number},{split}")
        Image.new("L", (20, 18), 40 + 150 * (number % 2)).save(tmp_path / "pets" / name)
    (tmp_path / "pets" / "labels.csv").write_text("\n".join(lines))

    def run_section(heading: str) -> Command:
        words = ("bash", "-c", script(PAGE, heading))
        return start(*words, cwd=tmp_path / "lockstep", **environment(tmp_path)).finish()

    return run_section


def test_the_least_data_set(run: Callable[[str], Command]) -> None:
    command = run("The least that works")
    assert "600 training and 100 test samples" in command.output
    weights = torch.load(command.folder / "model.pt", weights_only=True)
    assert weights["1.weight"].shape[1] == 2
    assert next(reversed(weights.values())).shape == (2,)


@pytest.mark.parametrize(
    ("heading", "samples"),
    [
        ("Random transforms", "600 training and 100 test samples"),
        ("Classes of unequal size", "1293 training, 144 validation and 360 test samples"),
        ("Whole batches: MixUp, CutMix, random erasing", "1293 training, 144 validation and 360 test samples"),
        ("Other forms of samples", "600 training and 100 test samples"),
        ("A class for each pixel", "400 training and 100 test samples"),
        ("Folders of images", "7 training, 1 validation and 8 test samples"),
        ("Images that a CSV file lists", "7 training, 1 validation and 4 test samples"),
    ],
)
def test_the_commands_of_a_section_train(run: Callable[[str], Command], heading: str, samples: str) -> None:
    command = run(heading)
    assert samples in command.output
    assert {line.split()[1] for line in command.epochs} == {"1/1"}


def test_what_is_held_out(run: Callable[[str], Command]) -> None:
    output = run("Validation and test").output
    first, *folds = [line for line in output.splitlines() if "validation and 360 test samples" in line]
    assert first.startswith("1150 training, 287 validation")
    assert len(folds) == 3
    assert all(line.startswith("958 training, 479 validation") for line in folds)
