"""A model of a user's with two heads: the outputs and the targets of a batch are dicts."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.commands import PYTHON_TRAIN, ROOT, Command
from support.own_data import Points

CODE = """
import torch
import torch.nn.functional as F
from torch import nn
from lockstep.tasks.base import Task
from support.own_data import Points

class TwoTargets(Points):
    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point, {"side": label, "sum": point.sum()}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, points):
        found = self.layer(points)
        return {"side": found[:, :2], "sum": found[:, 2]}

class Both(Task):
    better = {"loss": "min", "accuracy": "max"}
    monitor = "accuracy"

    def __call__(self, outputs, targets):
        loss = F.cross_entropy(outputs["side"], targets["side"], reduction="none")
        loss = loss + (outputs["sum"] - targets["sum"]).square()
        return {"loss": loss, "accuracy": outputs["side"].argmax(1) == targets["side"]}

    def predictions(self, outputs):
        return {"side": outputs["side"].argmax(1), "sum": outputs["sum"]}

class AsTheyAre(Both):
    predictions = Task.predictions
"""
DATA = "defaults: [pair]\ntrain: {_target_: heads.TwoTargets}\ntest: {_target_: heads.TwoTargets}\n"
TASK = "_target_: heads.Both\n"


def test_metrics_and_predictions_of_two_heads_are_over_the_samples(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "heads.py").write_text(CODE)
    for name, text in (("dataset/two", DATA), ("task/both", TASK), ("model/net", "_target_: heads.Net\n")):
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python_path = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    own = ["--config-dir=conf", "model=net", "task=both", "launch=fork"]
    train = [*own, "dataset=two", "dataset.classes=2", "trainer.precision=fp64", "trainer.epochs=2"]
    start(*PYTHON_TRAIN, *train, "trainer.batch_size=5", "hydra.run.dir=run", PYTHONPATH=python_path).finish()
    for mode in ("evaluate", "predict"):
        start(*PYTHON_TRAIN, *own, f"mode={mode}", "resume=run", PYTHONPATH=python_path).finish()
    start(*PYTHON_TRAIN, *own, "mode=export", "resume=run", "launch=env", PYTHONPATH=python_path).finish()
    exported = torch.export.load(tmp_path / "run" / "last.pt2").module()
    assert list(exported(torch.zeros(3, 4, dtype=torch.float64))) == ["side", "sum"]
    rows = list(csv.DictReader((tmp_path / "run" / "predictions.csv").open()))
    assert list(rows[0]) == ["index", "side", "sum", "truth_side", "truth_sum"]
    assert [float(row["truth_sum"]) for row in rows] == pytest.approx([float(point.sum()) for point, _ in Points()])
    right = sum(row["side"] == row["truth_side"] for row in rows)
    metrics = json.loads((tmp_path / "run" / "evaluation.json").read_text())["metrics"]
    assert metrics["accuracy"] == pytest.approx(right / len(rows))
    plain = ["task._target_=heads.AsTheyAre"]
    plain += ["mode=predict", "resume=run", "mode.file=plain.csv"]
    start(*PYTHON_TRAIN, *own, *plain, PYTHONPATH=python_path).finish()
    header = (tmp_path / "plain.csv").read_text().splitlines()[0]
    assert header == "index,prediction_side_0,prediction_side_1,prediction_sum,truth_side,truth_sum"
