"""mode=evaluate and mode=predict on a data set of a user's, whose targets are numbers."""

import csv
import json
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, ROOT, Command
from support.own_data import Values

TESTS = ROOT / "tests"


@pytest.fixture(scope="module")
def of_values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of conf/ and of run/, which was trained for one step on a data set of a user's, for regression."""
    folder = tmp_path_factory.mktemp("values")
    own = folder / "conf" / "dataset" / "values.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("train: {_target_: support.own_data.Values}\ntest: {_target_: support.own_data.Values}\n")
    words = ["--config-dir=conf", "dataset=values", "model=linear", "task=regression", "trainer.max_steps=1"]
    words += ["launch=fork", "hydra.run.dir=run"]
    Command([*PYTHON_TRAIN, *words], folder, PYTHONPATH=TESTS).finish()
    return folder


def test_predictions_and_targets_of_one_number_a_sample_are_a_column_each(of_values: Path) -> None:
    words = ["--config-dir=conf", "mode=predict", "resume=run"]
    Command([*PYTHON_TRAIN, *words], of_values, PYTHONPATH=TESTS).finish()
    rows = list(csv.DictReader((of_values / "run" / "predictions.csv").open()))
    assert list(rows[0]) == ["index", "prediction", "truth"]
    assert [float(row["truth"]) for row in rows] == pytest.approx([target for _, target in Values()])
    loss = json.loads((of_values / "run" / "run.json").read_text())["improvements"][-1][1]
    squares = [(float(row["prediction"]) - float(row["truth"])) ** 2 for row in rows]
    assert sum(squares) / len(rows) == pytest.approx(loss, rel=1e-5)


def test_an_evaluation_counts_the_samples_that_it_read_and_names_those_with_nan(of_values: Path) -> None:
    """In JSON there is no NaN, so no number of such an evaluation is written."""

    def evaluated(data: str, code: int) -> Command:
        words = ["--config-dir=conf", "mode=evaluate", "resume=run", "launch=fork", "dataset.on_error=skip"]
        words += [f"dataset.test._target_=support.own_data.{data}", f"mode.file={data}.json"]
        return Command([*PYTHON_TRAIN, *words], of_values, PYTHONPATH=TESTS).finish(code)

    assert ", over 22 samples at step 1" in evaluated("BrokenValues", 0).output
    assert json.loads((of_values / "BrokenValues.json").read_text())["samples"] == len(Values()) - 1
    output = evaluated("NaNValues", 3).output
    assert "step_00000001.pt is nan; in the test data sample 5 has NaN in its inputs; repair these samples" in output
    assert not (of_values / "NaNValues.json").exists()
