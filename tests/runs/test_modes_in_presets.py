"""`mode` and `resume` may stand in a preset or in conf/local: the run's own config is taken as if they were typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commands import PYTHON_TRAIN, Command

GLOBAL = "# @package _global_\n"
EVALUATE = "defaults:\n  - override /mode: evaluate\n"
# {file below --config-dir: its text}, and what is typed beside it.
CASES: dict[str, tuple[dict[str, str], list[str]]] = {
    "both in conf/local": ({"local/default": f"{EVALUATE}resume: run\n"}, []),
    "one in each": ({"local/default": EVALUATE, "experiment/judge": "resume: run\n"}, ["experiment=judge"]),
    "what is typed is the last word": ({"local/default": "resume: other\n"}, ["mode=evaluate", "resume=run"]),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run is that was trained on other data, with another model, than the defaults."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["dataset=random", "dataset.samples=40", "seed=3", "model=mlp", "model.width=8", "trainer.epochs=1"]
    Command([*PYTHON_TRAIN, *words, "logger=[]", "hydra.run.dir=run"], folder).finish()
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_runs_own_data_are_evaluated(start: Callable[..., Command], run: Path, tmp_path: Path, case: str) -> None:
    files, words = CASES[case]
    for name, text in files.items():
        path = tmp_path / "mine" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(GLOBAL + text)
    (tmp_path / "mine").mkdir(exist_ok=True)
    file = tmp_path / "found.json"
    typed = [f"--config-dir={tmp_path / 'mine'}", *words, f"mode.file={file}"]
    start(*PYTHON_TRAIN, *typed, cwd=run).finish()
    found: dict[str, Any] = json.loads(file.read_text())
    trained = json.loads((run / "run" / "run.json").read_text())
    assert found["metrics"] == pytest.approx(trained["test"]["metrics"], rel=1e-6)
    assert found["samples"] == trained["data"]["test_samples"]
    for key in ("dataset.samples", "dataset._target_", "model._target_", "model.width", "trainer.epochs"):
        assert found["config"][key] == trained["config"][key], key
    assert not (run / "outputs").exists()
