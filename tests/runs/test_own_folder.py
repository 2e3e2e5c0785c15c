"""Somebody's own work: what is beside its config is found, its files change after a run, its task fails."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lockstep
from support.commands import PYTHON_TRAIN, STARTERS, Command
from support.digits import digits

Start = Callable[..., Command]

PARTS = """
import torch
from torch import nn

from lockstep.tasks.tasks import CrossEntropy


class Weighted(CrossEntropy):
    def __init__(self, classes, limit, **options):
        super().__init__(**options)
        if classes > limit:
            raise ValueError(f"no weights for {classes} classes")


def points(train=True, scale=1.0):
    generator = torch.Generator().manual_seed(int(train))
    inputs = torch.rand(60, 5, generator=generator) * scale
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 2.5 * scale).long())


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.head = nn.Linear(5, classes)

    def forward(self, inputs):
        return self.head(inputs)

"""
POINTS = "{half}: {{_target_: own_parts.points, train: {train}, scale: 1.0}}\n"
OWN = [*PYTHON_TRAIN, "--config-dir=conf", "dataset=own", "logger=[]", "trainer.batch_size=15", "trainer.epochs=1"]
NET = ["model=mlp", "model.width=8"]
AVERAGED = "{precision: fp64, ema: {_target_: lockstep.training.ema.Average, decay: 0.9}}"


@pytest.fixture(autouse=True)
def own(tmp_path: Path) -> None:
    """Makes the folder. --config-dir=conf alone finds the module beside conf."""
    (tmp_path / "own_parts.py").write_text(PARTS)
    folder = tmp_path / "conf" / "dataset"
    folder.mkdir(parents=True)
    halves = [POINTS.format(half=half, train=train) for half, train in (("train", "true"), ("test", "false"))]
    (folder / "own.yaml").write_text("_target_: lockstep.data.Pair\n" + "".join(halves))
    (tmp_path / "conf" / "task").mkdir()
    weighted = "defaults: [classification]\n_target_: own_parts.Weighted\nclasses: ${dataset.classes}\n"
    (tmp_path / "conf" / "task" / "weighted.yaml").write_text(weighted)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["task._target_=own_parts.Weighted"], 2, "needs classes and limit; type +task.classes=<value> +task.limit="),
        (["task=weighted", "+task.limit=1"], 1, "ValueError: no weights for 2 classes"),
        (["task=weighted", "+task.limit=2"], 0, "rank 0 of 1"),
    ],
    ids=["needs the classes", "fails with the classes of the data", "has the classes"],
)
def test_what_the_constructor_of_a_task_needs_is_told_without_a_traceback(
    start: Start, words: list[str], code: int, said: str
) -> None:
    output = start(*OWN, *NET, *words).finish(code).output
    assert said in output
    assert "Traceback" not in output


@pytest.mark.parametrize("starter", ["python", "launch=spawn", "torchrun"])
def test_a_config_folder_alone_makes_what_is_beside_it_importable(start: Start, tmp_path: Path, starter: str) -> None:
    """In ranks, in the other processes that read data, and again where the run is used."""
    (tmp_path / "elsewhere").mkdir()
    words = ["--config-dir=../conf", "logger=[]", "dataset=own", "loader.num_workers=1", "model=mlp"]
    own = ["model._target_=own_parts.Net", "trainer.max_steps=2", "hydra.run.dir=run"]
    start(*STARTERS[starter], *words, *own, cwd=tmp_path / "elsewhere").finish()
    if starter == "python":
        evaluate = [*PYTHON_TRAIN, "mode=evaluate", "resume=run"]
        start(*evaluate, "--config-dir", "../conf", cwd=tmp_path / "elsewhere").finish()
        refused = start(*evaluate, cwd=tmp_path / "elsewhere").finish(2).sentence
        assert "or --config-dir=<the folder that holds dataset/own.yaml>" in refused


def test_each_evaluation_has_a_file_that_says_what_was_evaluated(start: Start, tmp_path: Path) -> None:
    start(*OWN, *NET, "hydra.run.dir=run").finish()
    evaluate = [*OWN[:3], "mode=evaluate", "resume=run"]
    for words in ([], ["dataset.test.scale=2.0"], ["mode.split=train"], []):
        start(*evaluate, *words).finish()
    files = [tmp_path / "run" / f"evaluation{number}.json" for number in ("", "_2", "_3")]
    assert sorted((tmp_path / "run").glob("evaluation*.json")) == files
    found = [json.loads(path.read_text()) for path in files]
    kinds = [(one["split"], one["config"]["dataset.test.scale"]) for one in found]
    assert kinds == [("test", 1.0), ("test", 2.0), ("train", 1.0)]
    assert len({one["metrics"]["loss"] for one in found}) == 3


def test_a_trained_run_is_used_as_it_was_trained_whatever_its_files_say_today(start: Start, tmp_path: Path) -> None:
    files = {
        "dataset/pixels.yaml": "defaults: [digits]\nmean: [0.3]\nstd: [0.4]\n",
        "model/net.yaml": "defaults: [mlp]\nwidth: 12\n",
        "local/default.yaml": f"# @package _global_\ntrainer: {AVERAGED}\ndataset: {{mean: [0.25]}}\n",
    }
    for name, text in files.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    words = [*PYTHON_TRAIN, "--config-dir=conf"]
    start(*words, "dataset=pixels", "model=net", "logger=[]", "trainer.epochs=1", "hydra.run.dir=run").finish()
    data = digits(train=False)
    images = torch.stack([data[index][0] for index in range(20)])

    def use(name: str, *typed: str) -> dict[str, object]:
        start(*words, "mode=evaluate", "resume=run", f"mode.file={name}.json", *typed).finish()
        found: dict[str, object] = json.loads((tmp_path / f"{name}.json").read_text())
        return found

    before = use("before")
    outputs = lockstep.load(tmp_path / "run")(images)
    (tmp_path / "conf" / "local" / "default.yaml").unlink()
    (tmp_path / "conf" / "dataset" / "pixels.yaml").write_text("defaults: [digits]\nmean: [0.9]\nstd: [1.4]\n")
    (tmp_path / "conf" / "model" / "net.yaml").write_text("defaults: [mlp]\nwidth: 20\n")
    assert use("after") == before
    typed = use("typed", "dataset.std=[0.5]", "trainer.ema=null")
    assert typed["metrics"] != before["metrics"]
    start(*words, "mode=export", "resume=run", "mode.format=torch_export", "mode.file=net.pt2").finish()
    start(*words, "mode=predict", "resume=run", "mode.file=found.csv").finish()
    net = lockstep.load(tmp_path / "run")
    assert torch.equal(net(images), outputs)
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(images), outputs, rtol=0, atol=1e-12)
    rows = [line.split(",") for line in (tmp_path / "found.csv").read_text().splitlines()]
    column = rows[0].index("prediction")
    assert [int(row[column]) for row in rows[1:21]] == net.predict(images)
