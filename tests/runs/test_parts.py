"""The examples of docs/parts.md, copied to a folder outside the repository and run by the page's own commands."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from support.commands import ROOT, Command
from support.event_files import scalars
from support.pages import COMMANDS, copy_examples, environment, example_files, section

PAGE = (ROOT / "docs" / "parts.md").read_text()
EXAMPLES = ROOT / "docs" / "examples"


def numbers(command):
    """All losses and metrics of the epochs' lines."""
    return [float(number) for line in command.epochs for number in re.findall(r"\d+\.\d+", line)]


def shapes(command, *names):
    saved = torch.load(command.folder / "model.pt", weights_only=True)
    return [tuple(saved[name].shape) for name in names]


# {section of the page: what its finished commands, and the run without any part of the page, say}
SECTIONS = {
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
    command = [sys.executable, str(ROOT / "src" / "train.py"), "trainer.epochs=1"]
    return Command(command, tmp_path_factory.mktemp("reference")).finish()


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_part_is_one_file_and_its_yaml(tmp_path, start, reference, heading):
    assert re.findall(r"^## (An? .*)$", PAGE, re.MULTILINE) == [*SECTIONS, "A strategy"]
    assert [Path(name).suffix for name, _ in example_files(section(PAGE, heading))] == [".py", ".yaml"]
    copy_examples(PAGE, tmp_path)
    words = ("bash", "-c", "set -e\n" + "".join(COMMANDS.findall(section(PAGE, heading))))
    run = start(*words, cwd=tmp_path / "lockstep", **environment(tmp_path)).finish()
    assert SECTIONS[heading](run, reference)


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
    node = '{_target_: my_logger.JSONLinesLogger, run_dir: "${run_dir}"}'
    more = ("logger=console", f"+logger.lines={node}", "trainer.epochs=1")
    command = train(*words, *more, PYTHONPATH=EXAMPLES)
    assert "rank 0 of 2" in command.output
    assert numbers(command) == pytest.approx(numbers(reference), abs=2e-3)
    lines = [json.loads(line) for line in (command.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 21, 21]
    assert f"val loss {lines[2]['val/loss']:.4f}" in command.output
    assert f"test:       loss {lines[3]['test/loss']:.4f}" in command.output
