"""Images that a CSV file lists: which they are, their targets, and what is said of a table that cannot be read."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.build import datasets
from lockstep.data.image_files import ImageFiles, class_folders, csv_lines, without_target
from lockstep.errors import ConfigError
from lockstep.modes.train import Train
from support.configs import composed
from support.decoding import save

TABLE = """\
file,label,split,age,height
a.jpg,10,train,1.5,7
"b,1.jpg",9,train,2,8
c.jpg,9,test,,9
d.jpg,10,later,4,9
"""


def read(folder: Path, split: str = "train", text: str = TABLE, **options: Any) -> ImageFiles:
    """The lines of a split of labels.csv, which is written with this text, unless it is empty."""
    if text:
        (folder / "labels.csv").write_text(text, encoding="utf-8-sig")
    defaults = {
        "csv_file": str(folder / "labels.csv"), "test_csv_file": None, "file_column": "file", "suffix": None,
        "label_columns": ["label"], "labels": "classes", "split_column": "split", "group_column": None,
        "classes": None, "class_names": None,
    }  # fmt: skip
    return csv_lines(str(folder), split == "train", split, **defaults | options)


def names(files: ImageFiles) -> list[str]:
    return [path.name for path, _ in files.files]


def test_a_column_says_which_images_are_for_tests_and_training_images_which_classes_there_are(tmp_path: Path) -> None:
    train, test = read(tmp_path), read(tmp_path, "test")
    assert (names(train), names(test)) == (["a.jpg", "b,1.jpg"], ["c.jpg"])
    assert read(tmp_path, "train").others == {"lines that say test as split": 1, "lines that say later as split": 1}
    assert train.classes == test.classes == ["9", "10"]  # in the order of their numbers
    assert (train.targets.tolist(), test.targets.tolist()) == ([1, 0], [0])
    assert read(tmp_path, class_names=["10", "9"]).targets.tolist() == [0, 1]
    assert read(tmp_path, text="file,label,split\na,dog,train\nb,cat,train\n", suffix=".png").classes == ["cat", "dog"]
    assert names(read(tmp_path, text="", suffix=".png")) == ["a.png", "b.png"]


def test_two_files_need_no_column_that_says_the_split(tmp_path: Path) -> None:
    test_csv = tmp_path / "test.csv"
    test_csv.write_text("file,label\ne.jpg,9\n")
    halves = [read(tmp_path, split, test_csv_file=str(test_csv), split_column="none") for split in ("train", "test")]
    assert [names(half) for half in halves] == [["a.jpg", "b,1.jpg", "c.jpg", "d.jpg"], ["e.jpg"]]


def test_labels_may_be_numbers_and_tests_may_have_none(tmp_path: Path) -> None:
    one = read(tmp_path, label_columns=["age"], labels="numbers")
    assert (one.targets.tolist(), one.targets.dtype, one.classes) == ([1.5, 2.0], torch.float64, [])
    several = read(tmp_path, label_columns=["age", "height"], labels="numbers")
    assert several.targets.tolist() == [[1.5, 7], [2, 8]]
    unlabelled = read(tmp_path, "test", label_columns=["age", "height"], labels="numbers")
    assert math.isnan(unlabelled.targets[0, 0])
    assert unlabelled.first_without_target == "c.jpg"
    assert one.first_without_target is None
    assert not without_target(torch.tensor([-100.0])).any()  # a number like any other
    (tmp_path / "new.csv").write_text("file\nf.jpg\n")
    files = read(tmp_path, "test", test_csv_file=str(tmp_path / "new.csv"))
    assert (files.targets.tolist(), files.first_without_target) == ([-100], "f.jpg")


def test_names_of_classes_stand_for_training_images_that_are_gone(tmp_path: Path) -> None:
    gone = read(tmp_path, text="", class_names=["9", "10"])
    assert (len(gone), gone.classes) == (0, ["9", "10"])
    save(tmp_path / "new" / "a.jpg")
    for split, found in (("train", []), ("new", ["a.jpg"])):
        files = class_folders(str(tmp_path), split == "train", "new", None, ["cat", "dog"])
        assert (names(files), files.classes) == (found, ["cat", "dog"])
    assert files.first_without_target == "a.jpg"
    with pytest.raises(ConfigError, match="found no folder"):
        class_folders(str(tmp_path), False, "new", None, None)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", {}, r"labels.csv cannot be read \(No such file or directory\); type dataset.csv_file="),
        ("a,b\n", {}, "has no column file, but a, b; type dataset.file_column=<name>"),
        (TABLE, {"label_columns": ["kind"]}, r"no column kind, but .*; type dataset.label_columns=\[<name>\]"),
        (TABLE, {"split_column": "fold"}, "no column fold, but .*; type dataset.split_column=<name>"),
        (TABLE, {"split": "val"}, "no line of .* says val in the column split, but later, test, train; type"),
        (TABLE, {"label_columns": ["label", "age"]}, "has 2 columns, .*; type dataset.label_columns="),
        (TABLE, {"classes": 3}, "dataset.classes=3 but .* have 2 classes; type dataset.classes=2"),
        (TABLE, {"labels": "numbers", "label_columns": ["file"]}, "line 2 of .* says a.jpg, and a number is wanted"),
        (TABLE + "e.jpg,eel,test,1,1\n", {"split": "test"}, "line 6 of .* says label eel, and no training image does"),
        (TABLE + ",9,train,1,1\n", {}, "line 6 of .* says no file; write one there, or remove the line"),
        (TABLE + "e.jpg,,train,1,1\n", {}, "line 6 of .* says no label; write one there, or remove the line"),
    ],
)
def test_a_table_that_cannot_be_read_is_explained(tmp_path: Path, text: str, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, text=text, **options)


def test_images_of_one_group_stay_on_one_side_of_a_validation_set(tmp_path: Path) -> None:
    lines = ["file,label,split,patient", "x.png,1,test,"]
    for number in range(60):
        save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{number % 2},train,p{number % 12}")
    save(tmp_path / "x.png")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    own = [f"dataset.root={tmp_path}", "dataset.size=8", "dataset.cache=off", "loader.validation=0.25"]
    for words, alike in ((["dataset.group_column=patient"], True), ([], False)):
        found = datasets(composed("dataset=image_csv", *own, *words), Train())
        assert found.held_out is not None
        held = {int(number) % 12 for number in found.held_out.numbers}
        trained = {number % 12 for number in range(60) if number not in found.held_out.numbers.tolist()}
        assert (not held & trained) == alike
        assert len(found.held_out.numbers) == 15
