"""What a trained run is used for: mode=evaluate and its like, as whole commands."""

import csv
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.data.digits import digits
from support.commands import PYTHON_TRAIN, ROOT, Command

Start = Callable[..., Command]
TRAINED = ["trainer.epochs=2", "trainer.precision=fp64", "trainer.ema=0.9", "objective=test/loss", "evaluation.every=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run in float64, whose last evaluation is its only one."""
    folder = tmp_path_factory.mktemp("trained") / "it's a run"
    quoted = str(folder).replace("'", "\\'")
    Command([*PYTHON_TRAIN, *TRAINED, f"hydra.run.dir='{quoted}'"], folder.parent).finish()
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def last_loss(run: Path) -> float:
    """What the run itself measured at its end, to the last digit."""
    (step, loss), *_ = json.loads((run / "run.json").read_text())["improvements"][::-1]
    assert step == 46
    return float(loss)


@pytest.mark.parametrize("launch", ["env", "fork"])
def test_evaluation_gives_the_numbers_of_the_training(run: Path, start: Start, tmp_path: Path, launch: str) -> None:
    before = files_of(run)
    words = [*PYTHON_TRAIN, "mode=evaluate", f'resume="{run}"', f"launch={launch}", "mode.file=found.json"]
    output = start(*words).finish().output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["metrics"]["loss"] == pytest.approx(last_loss(run), rel=1e-12)
    assert found["ranks"] == (2 if launch == "fork" else 1)
    assert found["samples"] == 360
    assert f"test loss {last_loss(run):.4f}" in output
    after = files_of(run)
    assert {name for name in after if name not in before} <= {
        "evaluate/train.log",
        "evaluate/logs/rank0.log",
        "evaluate/logs/rank1.log",
    }
    assert all(after[name] == before[name] for name in before if not name.startswith("evaluate/"))
    assert not list(tmp_path.glob("outputs"))


def test_a_mode_of_the_users_own(run: Path, start: Start, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "modes.md").read_text().split("## A mode of your own")[1]
    for name, text in re.findall(r"```(?:python|yaml)\n# ((?:my_work|conf)/\S+)\n(.*?)```", page, re.DOTALL):
        path = tmp_path / "mywork" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (command,) = re.findall(r"```bash\n(.*?)\n```", page, re.DOTALL)
    flags = ["--config-dir", "mywork/conf"]
    assert command.endswith("--config-dir ~/mywork/conf mode=confused resume=outputs/a launch=fork")
    path = os.pathsep.join(["mywork", os.environ.get("PYTHONPATH", "")])
    words = [*PYTHON_TRAIN, *flags, "mode=confused", f'resume="{run}"', "launch=fork"]
    output = start(*words, PYTHONPATH=path).finish().output
    (counts,) = re.findall(r"confused: \[(.*)\]", output)
    assert 0 < sum(map(int, counts.split(", "))) < 36


def predicted(start: Start, run: Path, folder: Path, *words: str) -> list[list[str]]:
    """The rows of the file, the header first."""
    start(*PYTHON_TRAIN, "mode=predict", f'resume="{run}"', "mode.file=rows.csv", *words).finish()
    with open(folder / "rows.csv") as file:
        return list(csv.reader(file))


def test_predictions_are_in_the_data_sets_order_at_any_world_size(run: Path, start: Start, tmp_path: Path) -> None:
    """Three ranks with 120 samples each, in batches of 50: the last one is smaller."""
    alone = predicted(start, run, tmp_path)
    together = predicted(
        start, run, tmp_path, "launch=fork", "launch.nproc_per_node=3", "evaluation.batch_size=50", "mode.snapshot=best"
    )
    assert alone[0] == together[0] == ["index", "prediction", *(f"probability_{n}" for n in range(10)), "truth"]
    targets = digits(train=False).targets.tolist()
    for rows in (alone[1:], together[1:]):
        assert [(int(row[0]), int(row[-1])) for row in rows] == list(enumerate(targets))
    for one, other in zip(alone[1:], together[1:], strict=True):
        assert one[1] == other[1]
        assert list(map(float, one[2:-1])) == pytest.approx(list(map(float, other[2:-1])), rel=1e-9)
        assert float(one[2 + int(one[1])]) == max(map(float, one[2:-1]))
    loss = sum(-math.log(float(row[2 + int(row[-1])])) for row in alone[1:]) / 360
    assert loss == pytest.approx(last_loss(run), rel=1e-9)
