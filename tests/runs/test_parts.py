"""The examples of docs/parts.md, copied to a folder outside the repository and run by the page's own commands."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from support.commands import ROOT, Command
from support.event_files import scalars
from support.pages import COMMANDS, copy_examples, environment, example_files, section

PAGE = (ROOT / "docs" / "parts.md").read_text()
EXAMPLES = ROOT / "docs" / "examples"
Start = Callable[..., Command]


@pytest.fixture
def run(tmp_path: Path, start: Start) -> Callable[[str], Command]:
    """run(heading) -> the finished commands of that section, typed as the page prints them."""
    copy_examples(PAGE, tmp_path)

    def run_section(heading: str) -> Command:
        words = ("bash", "-c", "set -e\n" + "".join(COMMANDS.findall(section(PAGE, heading))))
        return start(*words, cwd=tmp_path / "lockstep", **environment(tmp_path)).finish()

    return run_section


def trained_config(command: Command) -> dict:
    """The config that the run recorded."""
    return yaml.safe_load((command.folder / ".hydra" / "config.yaml").read_text())


def numbers(command: Command) -> list[float]:
    """All losses and metrics of the epochs' lines."""
    return [float(number) for line in command.epochs for number in re.findall(r"\d+\.\d+", line)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The run without any part of the page: one process, one epoch."""
    command = [sys.executable, str(ROOT / "src" / "train.py"), "trainer.epochs=1"]
    return Command(command, tmp_path_factory.mktemp("reference")).finish()


def test_every_part_is_one_file_and_its_yaml() -> None:
    headings = ["A model", "A data set", "A task", "An optimizer", "A scheduler"]
    assert [heading for heading in re.findall(r"^## (An? .*)$", PAGE, re.MULTILINE)] == [*headings, "A strategy"]
    for heading in headings:
        files = [name for name, _ in example_files(section(PAGE, heading))]
        assert [Path(name).suffix for name in files] == [".py", ".yaml"], heading


def with_example(train: Start, *words: str) -> Command:
    """One epoch with a file of docs/examples."""
    return train(*words, "trainer.epochs=1", PYTHONPATH=EXAMPLES)


def test_a_model(run: Callable[[str], Command]) -> None:
    weights = torch.load(run("A model").folder / "model.pt", weights_only=True)
    assert weights["0.weight"].shape == (16, 1, 3, 3)
    assert weights["5.weight"].shape == (10, 64)


def test_a_data_set(run: Callable[[str], Command]) -> None:
    command = run("A data set")
    assert "900 training, 100 validation and 200 test samples" in command.output
    assert torch.load(command.folder / "model.pt", weights_only=True)["1.weight"].shape == (128, 64)


def test_a_task(run: Callable[[str], Command], reference: Command) -> None:
    command = run("A task")
    assert re.search(r"val loss \d\.\d+ top3 0\.9\d+", command.output)
    assert "accuracy" not in command.output
    assert list((command.folder / "snapshots").glob("best_*"))
    assert numbers(command) != numbers(reference)


LOSS_ALONE = """
import torch.nn.functional as F
from lockstep.tasks.base import Task

class LossAlone(Task):
    def __call__(self, outputs, targets):
        return {"loss": F.cross_entropy(outputs, targets, reduction="none")}
"""


def test_a_metric_that_is_no_mean(train: Start, reference: Command, tmp_path: Path) -> None:
    (tmp_path / "loss_alone.py").write_text(LOSS_ALONE)
    recall = "{_target_: torchmetrics.Recall, task: multiclass, num_classes: 10, average: macro}"
    words = ["task._target_=loss_alone.LossAlone", f"+evaluation.metrics.balanced={recall}", "monitor=val/balanced"]
    command = train(*words, "trainer.epochs=1", PYTHONPATH=tmp_path)
    assert re.search(r"val loss \d\.\d+ balanced 0\.9\d+", command.output)
    assert numbers(command)[0] == pytest.approx(numbers(reference)[0], abs=2e-3)


def test_an_optimizer(run: Callable[[str], Command], reference: Command) -> None:
    command = run("An optimizer")
    assert trained_config(command)["optimizer"]["_target_"] == "my_work.optimizer.SGDW"
    # 21 steps of decay by 0.05 * 0.0001 change the weights by 1e-4: the rest is torch's SGD.
    assert numbers(command) == pytest.approx(numbers(reference), abs=2e-3)


def test_a_scheduler(run: Callable[[str], Command]) -> None:
    rates = dict(scalars(run("A scheduler").folder)["train/lr"])
    assert rates == pytest.approx({step: 0.05 * (1 - 0.9 * step / 21) for step in (10, 20)}, rel=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        ("strategy._target_=my_strategy.AverageAfterBackward", "launch=fork"),
        ("gradient_sync._target_=my_sync.GatherSum", "launch=fork"),
        ("launch._target_=my_launcher.PoolLauncher", "+launch.ranks=2"),
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_two_ranks_train_to_the_numbers_of_one(train: Start, reference: Command, words: tuple[str, ...]) -> None:
    command = with_example(train, *words)
    assert "rank 0 of 2" in command.output
    assert numbers(command) == pytest.approx(numbers(reference), abs=2e-3)


def test_a_logger(train: Start) -> None:
    node = '{_target_: my_logger.JSONLinesLogger, run_dir: "${run_dir}"}'
    command = with_example(train, "logger=console", f"+logger.lines={node}")
    lines = [json.loads(line) for line in (command.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 21, 21]
    assert f"val loss {lines[2]['val/loss']:.4f}" in command.output
    assert f"test:       loss {lines[3]['test/loss']:.4f}" in command.output
    assert not list(command.folder.glob("events.out.*"))
