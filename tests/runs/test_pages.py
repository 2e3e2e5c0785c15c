"""The pages of docs/: their commands, typed in a home folder that has what they speak of, in their order; and each
override that a page names."""

import csv
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lockstep.config.check import OPTIONS, check_nodes
from lockstep.config.schema import CONF
from support.commands import ROOT, TRAIN, Command
from support.configs import NEEDS, composed
from support.event_files import scalars
from support.pages import (
    COMMANDS,
    PAGES,
    PLACEHOLDER,
    code_spans,
    command_lines,
    copy_examples,
    environment,
    example_files,
    section,
)
from support.shards import write_tars

DATA, MODELS, PARTS, START, SWEEPS = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("data", "models", "parts", "start", "sweeps")
)


@pytest.fixture
def run(tmp_path, start):
    """run(page, heading, make) -> the finished commands of that section, typed as the page prints them."""

    def run_section(page, heading=None, make=None, change=("", "")):
        copy_examples(page, tmp_path)
        if make is not None:
            make(tmp_path)
        commands = COMMANDS.findall(section(page, heading) if heading else page)
        words = ("bash", "-c", "set -e\n" + "".join(commands).replace(*change))
        return start(*words, cwd=tmp_path / "lockstep", **environment(tmp_path)).finish(limit=220)

    return run_section


@pytest.mark.drill
def test_a_project_from_data_to_export(run, tmp_path):
    output, outputs = run(START).output, tmp_path / "lockstep" / "outputs"
    assert "162 training, 18 validation and 60 test samples" in output
    assert float(re.findall(r"test: +loss .*f1 (\d\.\d+)", output)[0]) > 0.8
    assert re.search(r"evaluated: test loss \d\.\d+, accuracy \d\.\d+, f1 \d\.\d+, over 60 samples", output)
    program = torch.export.load(outputs / "shapes.pt2").module()
    pixels = torch.tensor(np.asarray(Image.open(tmp_path / "shapes" / "photos" / "000.png"))).permute(2, 0, 1)[None]
    assert program(pixels).argmax(1).item() == 2  # of cross, disc and square
    for name, first, truth in (("shapes/predictions.csv", "photos/180.png", "square"), ("new.csv", "000.png", "")):
        with open(outputs / name) as file:
            row = next(csv.DictReader(file))
        assert (row["file"], row["truth"]) == (first, truth)
    assert re.search(r"best: +optimizer.lr=0", output)
    assert re.search(r"choosing: +val/f1 ", output)


@pytest.mark.drill
def test_from_a_sweep_to_the_number_that_is_reported(run):
    output = run(SWEEPS.split("\n## Which set decides\n")[1]).output
    assert len(re.findall(r"^best: +optimizer\.lr=0\.1\d?\b", output, re.MULTILINE)) >= 2
    assert len(re.findall(r"^finished .* \(5 runs\)$", output, re.MULTILINE)) == 5
    verdicts = re.findall(r"^(?:[AB] is better by|cannot be told apart|the same: ).*$", output, re.MULTILINE)
    assert len(verdicts) == 3
    assert re.match(r"B is better by \S+ points \(\S+ to \S+\)", verdicts[0])
    for said in (
        "choosing:   val/accuracy",
        "paired by seed",
        "paired by loader.fold",
        "1437 training and 360 test samples",
        "nothing is chosen, and its number is the test's alone",
    ):
        assert said in output


def test_fine_tuning(run):
    (said,) = re.findall(r"```\n(init: .*?)```", section(MODELS, "Fine-tuning"), re.DOTALL)
    output = run(MODELS, "Fine-tuning", change=("src/train.py", "src/train.py trainer.batch_size=500")).output
    assert all(line in output for line in said.splitlines())


def picture(number):
    return Image.new("RGB", (20, 18), (40 + 150 * (number % 2),) * 3)


def make_pictures(home):
    (home / "new_photos").mkdir()
    picture(0).save(home / "new_photos" / "new.png")
    for number in range(16):
        folder = home / "pictures" / ("train", "test")[number // 8] / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number}.png")


def make_pets(home):
    (home / "pets" / "photos").mkdir(parents=True)
    rows = [f"photos/{n}.png,{('beagle', 'poodle')[n % 2]},{n},{('train', 'test')[n // 8]}" for n in range(12)]
    (home / "pets" / "labels.csv").write_text("\n".join(["file,breed,age,split", *rows]))
    for number, row in enumerate(rows):
        picture(number).save(home / "pets" / row.partition(",")[0])


def make_table(home):
    rows = [f"{n},{n % 7},{'north' if n % 3 else 'south'},{'red' if n % 2 else 'white'}" for n in range(100)]
    (home / "wine.csv").write_text("\n".join(["acid,sugar,region,kind", *rows]))


def make_texts(home):
    (home / "lockstep" / "texts").mkdir()
    for shard, name in enumerate(("train-0", "train-1", "train-2", "test-3")):
        lines = [f"Document {number} of shard {shard}. " * 5 for number in range(10)]
        (home / "lockstep" / "texts" / f"{name}.txt").write_text("\n".join(lines))


def make_tars(home):
    (home / "lockstep" / "tars").mkdir()
    write_tars(home / "lockstep" / "tars", "train", [20, 20, 20])
    write_tars(home / "lockstep" / "tars", "test", [20], first=60)


def make_rows(home):
    datasets = pytest.importorskip("datasets")
    kinds = {"label": datasets.ClassLabel(names=["dark", "light"]), "note": datasets.Value("string")}
    columns = {"image": [picture(number) for number in range(80)], "label": [0, 1] * 40, "note": ["a text"] * 80}
    rows = datasets.Dataset.from_dict(columns, datasets.Features({"image": datasets.Image()} | kinds))
    rows.train_test_split(20).save_to_disk(str(home / "lockstep" / "dark_and_light"))


OF_DATA = {  # heading: (what makes its files, what the commands say of the samples, epochs)
    "Data of your own": (None, "540 training, 60 validation and 100 test samples", 1),
    "Folders of images": (make_pictures, "7 training, 1 validation and 8 test samples", 1),
    "Images that a CSV file lists": (make_pets, "7 training, 1 validation and 4 test samples", 1),
    "Images without labels": (make_pictures, "predicted: 1 samples of test", 1),
    "A table": (make_table, "72 training, 8 validation and 20 test samples", 1),
    "Text": (make_texts, "test samples", 1),
    "Tar files": (make_tars, "54 training, 6 validation and 20 test samples", 1),
    "Data sets of Hugging Face": (make_rows, "54 training, 6 validation and 20 test samples", 1),
    "Transforms": (None, "540 training, 60 validation and 100 test samples", 2),
    "Classes of unequal size": (None, "1293 training, 144 validation and 360 test samples", 1),
    "Validation and test": (None, "1150 training, 287 validation and 360 test samples", None),
}


# Two epochs of a ResNet take a minute; test_every_data_set.py trains on the others, too.
LATER = ("Transforms", "Tar files", "Data sets of Hugging Face", "Images that a CSV file lists", "Text")
HEADINGS = [pytest.param(each, marks=pytest.mark.drill) if each in LATER else each for each in OF_DATA]


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_commands_of_a_section_on_data_train(run, heading):
    headings = [line.removeprefix("## ") for line in DATA.splitlines() if line.startswith("## ")]
    assert {each for each in headings if COMMANDS.search(section(DATA, each))} == {*OF_DATA}
    make, said, epochs = OF_DATA[heading]
    command = run(DATA, heading, make)
    assert said in command.output
    if epochs:
        assert command.epochs[-1].split()[1] == f"{epochs}/{epochs}"
    else:
        assert command.output.count("958 training, 479 validation and 360 test samples") == 3  # folds
    if heading == "Data of your own":
        weights = torch.load(command.folder / "model.pt", weights_only=True)
        assert (weights["1.weight"].shape[1], next(reversed(weights.values())).shape) == (2, (2,))


def numbers(command):
    """All losses and metrics of the epochs' lines."""
    return [float(number) for line in command.epochs for number in re.findall(r"\d+\.\d+", line)]


def shapes(command, *names):
    saved = torch.load(command.folder / "model.pt", weights_only=True)
    return [tuple(saved[name].shape) for name in names]


# {section of the page: what its finished commands, and the run without any part of the page, say}
OF_PARTS = {
    "A model": lambda run, _: shapes(run, "0.weight", "5.weight") == [(16, 1, 3, 3), (10, 64)],
    "A data set": lambda run, _: (
        "900 training, 100 validation and 200 test samples" in run.output and shapes(run, "1.weight") == [(128, 64)]
    ),
    "A task": lambda run, alone: (
        re.search(r"val loss \d\.\d+ top3 0\.9\d+", run.output)
        and "accuracy" not in run.output
        and list((run.folder / "snapshots").glob("best_*"))
        and numbers(run) != numbers(alone)
    ),
    # 21 steps of decay by 0.05 * 0.0001 change the weights by 1e-4: the rest is torch's SGD.
    "An optimizer": lambda run, alone: (
        "my_work.optimizer.SGDW" in (run.folder / ".hydra" / "config.yaml").read_text()
        and numbers(run) == pytest.approx(numbers(alone), abs=2e-3)
    ),
    "A scheduler": lambda run, _: (
        dict(scalars(run.folder)["train/lr"])
        == pytest.approx({step: 0.05 * (1 - 0.9 * step / 21) for step in (10, 20)}, rel=1e-6)
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run without any part of the page: one process, one epoch."""
    return Command([sys.executable, TRAIN, "trainer.epochs=1"], tmp_path_factory.mktemp("reference")).finish()


@pytest.mark.parametrize("heading", OF_PARTS)
def test_a_part_is_one_file_and_its_yaml(run, reference, heading):
    assert re.findall(r"^## (An? .*)$", PARTS, re.MULTILINE) == [*OF_PARTS, "A strategy"]
    assert [Path(name).suffix for name, _ in example_files(section(PARTS, heading))] == [".py", ".yaml"]
    assert OF_PARTS[heading](run(PARTS, heading), reference)


def test_a_group_of_ones_own_has_options(tmp_path):
    copy_examples(PARTS, tmp_path)
    for word, said in (("+augmentation=strong", "flip: true"), ("augmentation=strong", "; type +augmentation=strong")):
        words = [sys.executable, TRAIN, "--config-dir", tmp_path / "mywork" / "conf", word, "--cfg", "job"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("strategy._target_=my_strategy.AverageAfterBackward", "launch=fork"),
        ("gradient_sync._target_=my_sync.GatherSum", "launch=fork"),
        ("launch._target_=my_launcher.PoolLauncher", "+launch.ranks=2"),
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_two_ranks_train_to_the_numbers_of_one_with_a_logger_of_ones_own(train, reference, words):
    node = "{_target_: my_logger.JSONLinesLogger}"
    more = ("logger=console", f"+logger.lines={node}", "trainer.epochs=1")
    command = train(*words, *more, PYTHONPATH=ROOT / "docs" / "examples")
    assert "rank 0 of 2" in command.output
    assert numbers(command) == pytest.approx(numbers(reference), abs=2e-3)
    lines = [json.loads(line) for line in (command.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 21, 21]
    assert f"val loss {lines[2]['val/loss']:.4f}" in command.output
    assert f"test:       loss {lines[3]['test/loss']:.4f}" in command.output


OVERRIDE = re.compile(r"[+~]*[\w/.@]+=\S+")
FOREIGN_KEYS = {"weights_only", "is_host", "AuthInfo"}  # of Python, torchrun or Slurm
NOT_HERE = ("model=mine", "backend.socket_ifname=", "hydra.")  # what this machine lacks


def overrides_of(page):
    """Those of each command, and those of each code span that holds nothing else. The tests above run the commands with
    --config-dir."""
    found = {tuple(words) for words in map(str.split, code_spans(page)) if all(map(OVERRIDE.fullmatch, words))}
    for line in command_lines(page) + code_spans(page):
        if "src/train.py" in line and "--config-dir" not in line:
            typed = re.split(r"[;&|]|^'", line.partition("src/train.py")[2])[0]  # "'" ends the command of bash -c
            words = shlex.split(typed, comments=True)
            found.add(tuple(first_value(word) if "-m" in words else word for word in words if OVERRIDE.fullmatch(word)))
    return sorted(found)


def first_value(word):
    """lr=0.1,0.2 -> lr=0.1, and lr=tag(log,interval(0.1,1)) -> lr=0.1."""
    key, _, values = word.partition("=")
    return f"{key}={values.rpartition('(')[2].partition(',')[0]}"


def usable(overrides):
    """Without placeholders, environment variables and keys of other programs."""
    words = [word for word in overrides if not PLACEHOLDER.search(word) and not word.startswith(NOT_HERE)]
    keys = [word.partition("=")[0] for word in words]
    return [word for word, key in zip(words, keys, strict=True) if key not in FOREIGN_KEYS and not key.isupper()]


def with_needed_options(overrides):
    """For `strategy.count=4` alone, the option that has this key comes first: strategy=virtual_ranks."""
    chosen, needed = {word.partition("=")[0] for word in overrides}, {}
    for word in overrides:
        group, _, name = word.partition("=")[0].partition(".")
        options = [option for option in OPTIONS.get(group, []) if name in written_in(group, option)]
        if name and options and group not in chosen:
            needed.setdefault(group, f"{group}={options[-1]}")
    words = [*needed.values(), *overrides]
    told = [need for word in words for need in NEEDS.get(word.lstrip("+"), [])]
    words += [word for word in told if word.partition("=")[0] not in chosen]
    names_data = any(word.startswith(("dataset=", "experiment=", "+experiment=")) for word in words)
    return ["dataset=text", *words] if "model=gpt" in words and not names_data else words


def written_in(group, option):
    found = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
    return found.get(group, found)  # an option for the whole config has its own group in it


@cache  # several pages name the same ones
def require_accepted(*words):
    config = composed(*words, whole=False)
    if not any("_target_" in word for word in words):
        check_nodes(replace(config, dataset={}))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_override_composes_and_is_accepted(page):
    for overrides in overrides_of(page):
        try:
            require_accepted(*with_needed_options(usable(overrides)))
        except Exception as error:
            pytest.fail(f"{page.name}: {' '.join(overrides)}: {error}")
