"""What a trained run is used for: mode=evaluate and its like, as whole commands."""

import csv
import importlib
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import lockstep
from lockstep.errors import ConfigError
from support.commands import ON_TEST, PYTHON_TRAIN, ROOT, WHOLE, Command, ema
from support.digits import digits

pytestmark = pytest.mark.whole

Start = Callable[..., Command]
TESTS = ROOT / "tests"
TRAINED = [
    ON_TEST,
    "loader.validation=0.1",
    "monitor=val/loss",
    "trainer.epochs=2",
    "trainer.precision=fp64",
    ema(0.9),
]
TRAINED += ["evaluation.every=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run in float64, whose last evaluation is its only one."""
    folder = tmp_path_factory.mktemp("trained") / "it's a run"
    quoted = str(folder).replace("'", "\\'")
    Command([*PYTHON_TRAIN, *WHOLE, *TRAINED, f"hydra.run.dir='{quoted}'"], folder.parent).finish()
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def last_loss(run: Path) -> float:
    """What the run itself measured at its end, to the last digit."""
    run_json = json.loads((run / "run.json").read_text())
    assert run_json["steps"] == 46
    return float(run_json["objective"]["last"])


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


def test_a_mode_uses_what_the_run_was_trained_with_whatever_became_of_its_files(start: Start, tmp_path: Path) -> None:
    """Its YAML is edited, and the file of its first weights is gone. Another evaluation has a file of its own."""
    own = tmp_path / "conf" / "dataset" / "own.yaml"
    own.parent.mkdir(parents=True)
    parts = [f"{name}: {{_target_: support.digits.digits, train: {name == 'train'}}}" for name in ("train", "test")]
    text = "\n".join(
        ["_target_: lockstep.data.Pair", *parts, "shape: [1, 8, 8]", "classes: 10", "mean: [0.9]", "std: [0.1]"]
    )
    own.write_text(text)
    words = [*PYTHON_TRAIN, "--config-dir=conf", "dataset=own", "model=linear", "trainer.precision=fp64", "logger=[]"]
    start(*words, "trainer.max_steps=1", "hydra.run.dir=first").finish()
    (tmp_path / "first" / "model.pt").rename(tmp_path / "begin.pt")
    start(*words, "trainer.epochs=1", "parameters.init=begin.pt", "hydra.run.dir=run").finish()
    last = json.loads((tmp_path / "run" / "run.json").read_text())["objective"]["last"]
    (tmp_path / "begin.pt").unlink()
    own.write_text(text.replace("0.9", "0.1"))
    evaluate = [*PYTHON_TRAIN, "mode=evaluate", "resume=run"]
    for more, std, name in (([], 0.1, ""), (["dataset.std=[0.2]"], 0.2, "_2")):
        start(*evaluate, "--config-dir=conf", *more).finish()
        found = json.loads((tmp_path / "run" / f"evaluation{name}.json").read_text())
        assert (found["config"]["dataset.mean"], found["config"]["dataset.std"]) == ([0.9], [std])
        assert (found["metrics"]["accuracy"] == last) == (std == 0.1)


def test_a_mode_of_the_users_own(run: Path, start: Start, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "docs" / "examples"), os.environ.get("PYTHONPATH", "")])
    words = [*PYTHON_TRAIN, "mode._target_=my_mode.Confused", "+mode.snapshot=last", f'resume="{run}"', "launch=fork"]
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


def images() -> torch.Tensor:
    return digits(train=False).inputs


def mean_loss(outputs: torch.Tensor) -> float:
    return float(F.cross_entropy(outputs.detach().double(), digits(train=False).targets))


def test_a_loaded_net_gives_what_the_evaluation_computed(run: Path) -> None:
    """In this process: no Hydra, no process group."""
    net = lockstep.load(run)
    with torch.no_grad():
        outputs = net(images())
    assert mean_loss(outputs) == pytest.approx(last_loss(run), rel=1e-12)
    assert net.predict(images()[:3]) == outputs[:3].argmax(1).tolist()
    assert not net.training
    best = lockstep.load(str(run), which="best")  # its only evaluation was at the end
    assert torch.equal(best(images()), outputs)
    with pytest.raises(ConfigError, match="run=.*/nothing does not exist; type run=<a run folder"):
        lockstep.load(run / "nothing")


def test_an_exported_net_holds_its_preprocessing_for_any_batch(run: Path, start: Start, tmp_path: Path) -> None:
    start(*PYTHON_TRAIN, "mode=export", f'resume="{run}"', "mode.snapshot=best", "mode.file=net.pt2").finish()
    exported = torch.export.load(tmp_path / "net.pt2").module()
    assert mean_loss(exported(images())) == pytest.approx(last_loss(run), rel=1e-9)
    assert exported(images()[:1]).shape == (1, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]


def test_a_full_disk_is_named(run: Path, tmp_path: Path) -> None:
    """No file may be larger than 20 KiB."""
    words = ["mode=export", f'resume="{run}"', "mode.file=net.pt2"]
    command = Command(["bash", "-c", 'ulimit -f 20; "$@"', "bash", *PYTHON_TRAIN, *words], tmp_path).finish(2)
    assert command.sentence.endswith(
        "net.pt2 cannot be written (File too large); type mode.file=<a file that you can write>"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["mode=evaluate"], "mode=evaluate needs a trained run; type resume=<a run folder>"),
        (["mode=evaluate", "resume=x"], "resume=x does not exist; type resume=<a run folder"),
        (["mode=evaluate", "resume={run}", "-m"], "mode=evaluate is no training, and a sweep trains"),
        (["mode=evaluate", "resume={run}", "model=mlp"], "does not fit this run: model._target_ ("),
        (
            ["mode=evaluate", "resume={run}", "mode.snapshot=nope"],
            "mode.snapshot=nope does not exist; type mode.snapshot=<a run folder or one of its",
        ),
        (["mode=export", "resume={run}", "launch=fork"], "mode=export is the work of one process, not of 2"),
    ],
)
def test_what_is_refused(run: Path, start: Start, words: list[str], sentence: str) -> None:
    filled = [word.replace("{run}", f'"{run}"') for word in words]
    assert sentence in start(*PYTHON_TRAIN, *filled).finish(2).sentence


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="pip install onnx onnxscript onnxruntime")
def test_an_onnx_file_gives_the_nets_outputs(run: Path, start: Start, tmp_path: Path) -> None:
    words = [*PYTHON_TRAIN, "mode=export", f'resume="{run}"', "mode.format=onnx", "mode.file=net.onnx"]
    start(*words, "trainer.precision=fp32").finish()
    session = importlib.import_module("onnxruntime").InferenceSession(tmp_path / "net.onnx")
    for batch in (images(), images()[:1]):
        (outputs,) = session.run(None, {"samples": batch.numpy()})
        assert torch.allclose(torch.from_numpy(outputs), lockstep.load(run)(batch).float(), atol=1e-4)
