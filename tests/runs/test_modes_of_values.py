"""mode=evaluate and mode=predict on a data set of a user's, whose targets are numbers."""

import csv
import json
from pathlib import Path

import pytest
import torch

from support.commands import PYTHON_TRAIN, ROOT, Command
from support.own_data import Values

TESTS = ROOT / "tests"
TYPED = ["--config-dir=conf", "model=versioned"]
MODEL = "{_target_: support.models.Versioned, in_features: 4, out_features: 1}\n"


@pytest.fixture(scope="module")
def of_values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of conf/ and of run/, which was trained for one step on a data set of a user's, for regression."""
    folder = tmp_path_factory.mktemp("values")
    data = "defaults: [pair]\n" + "".join(
        f"{one}: {{_target_: support.own_data.Values}}\n" for one in ("train", "test")
    )
    for name, text in (("dataset/values", data), ("model/versioned", MODEL)):
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    words = [
        *TYPED,
        "dataset=values",
        "task=regression",
        "trainer.max_steps=1",
        "trainer.batch_size=1",
        "hydra.run.dir=run",
    ]
    Command([*PYTHON_TRAIN, *words], folder, PYTHONPATH=TESTS).finish()
    return folder


def test_predictions_and_targets_of_one_number_a_sample_are_a_column_each(of_values: Path) -> None:
    words = [*TYPED, "mode=predict", "resume=run"]
    Command([*PYTHON_TRAIN, *words], of_values, PYTHONPATH=TESTS).finish()
    rows = list(csv.DictReader((of_values / "run" / "predictions.csv").open()))
    assert list(rows[0]) == ["index", "prediction", "truth"]
    assert [float(row["truth"]) for row in rows] == pytest.approx([target for _, target in Values()])
    loss = json.loads((of_values / "run" / "run.json").read_text())["test"]["metrics"]["loss"]
    squares = [(float(row["prediction"]) - float(row["truth"])) ** 2 for row in rows]
    assert sum(squares) / len(rows) == pytest.approx(loss, rel=1e-5)


def test_an_evaluation_names_samples_that_cannot_be_read_and_those_with_nan(of_values: Path) -> None:
    """In JSON there is no NaN, so no number of such an evaluation is written."""

    def evaluated(data: str, code: int) -> Command:
        words = [*TYPED, "mode=evaluate", "resume=run", "launch=fork"]
        words += [f"dataset.test._target_=support.own_data.{data}", f"mode.file={data}.json"]
        return Command([*PYTHON_TRAIN, *words], of_values, PYTHONPATH=TESTS).finish(code)

    output = evaluated("BrokenValues", 1).output
    assert "sample 5 of the test data cannot be read (OSError: image file is truncated)" in output
    output = evaluated("NaNValues", 1).output
    assert "the test loss is nan at step 1; " in output
    assert not (of_values / "NaNValues.json").exists()


def test_a_net_with_more_than_tensors_in_its_state_is_exported(of_values: Path) -> None:
    """Its only test sample is example enough."""
    words = [*TYPED, "mode=export", "resume=run", "+dataset.test.count=1", "mode.file=net.pt2"]
    Command([*PYTHON_TRAIN, *words], of_values, PYTHONPATH=TESTS).finish()
    expected = torch.load(of_values / "run" / "model.pt", weights_only=True)
    module = torch.export.load(of_values / "net.pt2").module()
    assert module(torch.zeros(3, 4, dtype=torch.float64)).tolist() == [[expected["bias"].item()]] * 3
