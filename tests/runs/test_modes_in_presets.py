"""`mode` and `resume` may stand in a preset or in conf/local: the run's own config is taken as if they were typed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import PYTHON_TRAIN, Command

GLOBAL = "# @package _global_\n"
EVALUATE = "defaults:\n  - override /mode: evaluate\n"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"local/default": f"{EVALUATE}resume: run\n"}, []),
        ({"local/default": EVALUATE, "experiment/judge": "resume: run\n"}, ["experiment=judge"]),
        ({"local/default": "resume: other\n"}, ["mode=evaluate", "resume=run"]),
    ],
    ids=["both in conf/local", "one in each", "what is typed is the last word"],
)
def test_the_runs_own_data_are_evaluated(
    start: Callable[..., Command], tmp_path: Path, files: dict[str, str], words: list[str]
) -> None:
    """The run was trained on other data, with another model, than the defaults."""
    own = ["dataset=random", "dataset.samples=40", "seed=3", "model=mlp", "model.width=8", "trainer.epochs=1"]
    start(*PYTHON_TRAIN, *own, "logger=[]", "hydra.run.dir=run").finish()
    for name, text in files.items():
        path = tmp_path / "mine" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(GLOBAL + text)
    start(*PYTHON_TRAIN, "--config-dir=mine", *words, "mode.file=found.json").finish()
    found, trained = (json.loads((tmp_path / name).read_text()) for name in ("found.json", "run/run.json"))
    assert found["metrics"] == pytest.approx(trained["test"]["metrics"], rel=1e-6)
    assert found["samples"] == trained["data"]["test_samples"]
    for key in ("dataset.samples", "dataset._target_", "model._target_", "model.width", "trainer.epochs"):
        assert found["config"][key] == trained["config"][key], key
    assert not (tmp_path / "outputs").exists()
