"""The commands of docs/data.md, typed in a home folder that has what the page speaks of."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from support.commands import ROOT, Command
from support.pages import COMMANDS, copy_examples, environment, section
from support.shards import write_tars

PAGE = (ROOT / "docs" / "data.md").read_text()
HEADINGS = [line.removeprefix("## ") for line in PAGE.splitlines() if line.startswith("## ")]


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (20, 18), (40 + 150 * (number % 2),) * 3)


def make_pictures(home: Path) -> None:
    (home / "new_photos").mkdir()
    picture(0).save(home / "new_photos" / "new.png")
    for number in range(16):
        folder = home / "pictures" / ("train", "test")[number // 8] / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number}.png")


def make_pets(home: Path) -> None:
    (home / "pets" / "photos").mkdir(parents=True)
    rows = [f"photos/{n}.png,{('beagle', 'poodle')[n % 2]},{n},{('train', 'test')[n // 8]}" for n in range(12)]
    (home / "pets" / "labels.csv").write_text("\n".join(["file,breed,age,split", *rows]))
    for number, row in enumerate(rows):
        picture(number).save(home / "pets" / row.partition(",")[0])


def make_table(home: Path) -> None:
    rows = [f"{n},{n % 7},{'north' if n % 3 else 'south'},{'red' if n % 2 else 'white'}" for n in range(100)]
    (home / "wine.csv").write_text("\n".join(["acid,sugar,region,kind", *rows]))


def make_texts(home: Path) -> None:
    (home / "lockstep" / "texts").mkdir()
    for shard, name in enumerate(("train-0", "train-1", "train-2", "test-3")):
        lines = [f"Document {number} of shard {shard}. " * 5 for number in range(10)]
        (home / "lockstep" / "texts" / f"{name}.txt").write_text("\n".join(lines))


def make_tars(home: Path) -> None:
    (home / "lockstep" / "tars").mkdir()
    write_tars(home / "lockstep" / "tars", "train", [20, 20, 20])
    write_tars(home / "lockstep" / "tars", "test", [20], first=60)


def make_rows(home: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = {"label": datasets.ClassLabel(names=["dark", "light"]), "note": datasets.Value("string")}
    columns = {"image": [picture(number) for number in range(80)], "label": [0, 1] * 40, "note": ["a text"] * 80}
    rows = datasets.Dataset.from_dict(columns, datasets.Features({"image": datasets.Image()} | kinds))
    rows.train_test_split(20).save_to_disk(str(home / "lockstep" / "dark_and_light"))


SECTIONS = {  # heading: (what makes its files, what the command says of the samples, epochs)
    "Folders of images": (make_pictures, "7 training, 1 validation and 8 test samples", 1),
    "Images that a CSV file lists": (make_pets, "7 training, 1 validation and 4 test samples", 1),
    "Images without labels": (make_pictures, "predicted: 1 samples of test", 1),
    "A table": (make_table, "72 training, 8 validation and 20 test samples", 1),
    "Text": (make_texts, "test samples", 1),
    "Tar files": (make_tars, "54 training, 6 validation and 20 test samples", 1),
    "Data sets of Hugging Face": (make_rows, "54 training, 6 validation and 20 test samples", 1),
    "Transforms": (None, "540 training, 60 validation and 100 test samples", 2),
    "Classes of unequal size": (None, "1293 training, 144 validation and 360 test samples", 1),
}


@pytest.fixture
def run(tmp_path: Path, start: Callable[..., Command]) -> Callable[..., Command]:
    """run(heading, make) -> the finished commands of that section, typed as the page prints them."""

    def run_section(heading: str, make: Callable[[Path], None] | None = None) -> Command:
        copy_examples(PAGE, tmp_path)
        if make is not None:
            make(tmp_path)
        words = ("bash", "-c", "set -e\n" + "".join(COMMANDS.findall(section(PAGE, heading))))
        return start(*words, cwd=tmp_path / "lockstep", **environment(tmp_path)).finish()

    return run_section


def test_every_section_with_commands_is_run() -> None:
    with_commands = {heading for heading in HEADINGS if COMMANDS.search(section(PAGE, heading))}
    assert with_commands == {*SECTIONS, "Data of your own", "Validation and test"}


def test_data_of_ones_own(run: Callable[..., Command]) -> None:
    command = run("Data of your own")
    assert "540 training, 60 validation and 100 test samples" in command.output
    weights = torch.load(command.folder / "model.pt", weights_only=True)
    assert weights["1.weight"].shape[1] == 2
    assert next(reversed(weights.values())).shape == (2,)


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_commands_of_a_section_train(run: Callable[..., Command], heading: str) -> None:
    make, said, epochs = SECTIONS[heading]
    command = run(heading, make)
    assert said in command.output
    assert command.epochs[-1].split()[1] == f"{epochs}/{epochs}"


def test_what_is_held_out(run: Callable[..., Command]) -> None:
    output = run("Validation and test").output
    first, *folds = [line for line in output.splitlines() if "validation and 360 test samples" in line]
    assert first.startswith("1150 training, 287 validation")
    assert len(folds) == 3
    assert all(line.startswith("958 training, 479 validation") for line in folds)
