"""What a trained run is used for: mode=evaluate and its like, as whole commands."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

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
