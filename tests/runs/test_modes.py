"""What a trained run is used for: mode=evaluate and its like, as whole commands."""

import csv
import importlib
import importlib.util
import json
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F

import lockstep
from lockstep.errors import ConfigError
from support.commands import ON_TEST, PYTHON_TRAIN, ROOT, WHOLE, Command, ema
from support.digits import digits
from support.own_data import Values

pytestmark = pytest.mark.whole

TRAINED = [ON_TEST, "loader.validation=0.1", "monitor=val/loss", "trainer.epochs=2", "trainer.precision=fp64", ema(0.9)]
PREPROCESSED = "_target_: lockstep.data.Pair\nshape: [1, 8, 8]\nclasses: 10\nmean: [0.9]\nstd: [0.1]\n"
NODE = "{_target_: support.digits.digits, train: %s}"
PREPROCESSED += f"train: {NODE % 'true'}\ntest: {NODE % 'false'}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run in float64, whose last evaluation is its only one."""
    folder = tmp_path_factory.mktemp("trained") / "it's a run"
    quoted = str(folder).replace("'", "\\'")
    words = [*WHOLE, *TRAINED, "evaluation.every=2", f"hydra.run.dir='{quoted}'"]
    Command([*PYTHON_TRAIN, *words], folder.parent).finish()
    return folder


def json_of(path):
    return json.loads(path.read_text())


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def last_loss(run):
    """What the run itself measured at its end, to the last digit."""
    run_json = json_of(run / "run.json")
    assert run_json["steps"] == 46
    return run_json["objective"]["last"]


def images():
    return digits(train=False).inputs


def mean_loss(outputs):
    return float(F.cross_entropy(outputs.detach().double(), digits(train=False).targets))


@pytest.mark.parametrize("launch", ["env", "fork"])
def test_evaluation_gives_the_numbers_of_the_training_and_changes_no_file(run, start, tmp_path, launch):
    def files():
        found = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
        return {name: path.read_bytes() for name, path in found.items() if not name.startswith("evaluate/")}

    before = files()
    words = ["mode=evaluate", f'resume="{run}"', f"launch={launch}", "mode.file=found.json"]
    assert f"test loss {last_loss(run):.4f}" in start(*PYTHON_TRAIN, *words).finish().output
    found = json_of(tmp_path / "found.json")
    assert found["metrics"]["loss"] == pytest.approx(last_loss(run), rel=1e-12)
    assert (found["ranks"], found["samples"]) == (2 if launch == "fork" else 1, 360)
    assert files() == before
    assert not list(tmp_path.glob("outputs"))


def test_a_mode_uses_what_the_run_was_trained_with_whatever_became_of_its_files(start, tmp_path):
    """Its YAML is edited, and the file of its first weights is gone. Another evaluation has a file of its own."""
    own = tmp_path / "conf" / "dataset" / "own.yaml"
    write(own, PREPROCESSED)
    words = [*PYTHON_TRAIN, "--config-dir=conf", "dataset=own", "model=linear", "trainer.precision=fp64", "logger=[]"]
    start(*words, "trainer.max_steps=1", "hydra.run.dir=first").finish()
    (tmp_path / "first" / "model.pt").rename(tmp_path / "begin.pt")
    start(*words, "trainer.epochs=1", "parameters.init=begin.pt", "hydra.run.dir=run").finish()
    last = json_of(tmp_path / "run" / "run.json")["objective"]["last"]
    (tmp_path / "begin.pt").unlink()
    own.write_text(PREPROCESSED.replace("0.9", "0.1"))
    for more, std, name in (([], 0.1, ""), (["dataset.std=[0.2]"], 0.2, "_2")):
        start(*PYTHON_TRAIN, "mode=evaluate", "resume=run", "--config-dir=conf", *more).finish()
        found = json_of(tmp_path / "run" / f"evaluation{name}.json")
        assert (found["config"]["dataset.mean"], found["config"]["dataset.std"]) == ([0.9], [std])
        assert (found["metrics"]["accuracy"] == last) == (std == 0.1)


def test_mode_and_resume_may_stand_in_a_preset_or_in_conf_local(start, tmp_path):
    """The run was trained on other data, with another model, than the defaults. What is typed is the last word."""
    own = ["dataset=random", "dataset.samples=40", "seed=3", "model=mlp", "model.width=8", "trainer.epochs=1"]
    start(*PYTHON_TRAIN, *own, "logger=[]", "hydra.run.dir=run").finish()
    trained, head = json_of(tmp_path / "run" / "run.json"), "# @package _global_\n"
    mode = "defaults:\n  - override /mode: evaluate\n"
    for number, (local, preset, words) in enumerate([
        (f"{mode}resume: run\n", "", []),
        (mode, "resume: run\n", ["experiment=judge"]),
        ("resume: other\n", "", ["mode=evaluate", "resume=run"]),
    ]):  # fmt: skip
        write(tmp_path / f"{number}" / "local" / "default.yaml", head + local)
        write(tmp_path / f"{number}" / "experiment" / "judge.yaml", head + preset)
        start(*PYTHON_TRAIN, f"--config-dir={number}", *words, "mode.file=found.json").finish()
        found = json_of(tmp_path / "found.json")
        assert found["metrics"] == pytest.approx(trained["test"]["metrics"], rel=1e-6)
        assert found["samples"] == trained["data"]["test_samples"]
        for key in ("dataset.samples", "dataset._target_", "model._target_", "model.width", "trainer.epochs"):
            assert found["config"][key] == trained["config"][key], key
    assert not (tmp_path / "outputs").exists()


def test_a_mode_of_the_users_own(run, start):
    path = os.pathsep.join([str(ROOT / "docs" / "examples"), os.environ.get("PYTHONPATH", "")])
    words = [*PYTHON_TRAIN, "mode._target_=my_mode.Confused", "+mode.snapshot=last", f'resume="{run}"', "launch=fork"]
    (counts,) = re.findall(r"confused: \[(.*)\]", start(*words, PYTHONPATH=path).finish().output)
    assert 0 < sum(map(int, counts.split(", "))) < 36


def test_predictions_are_in_the_data_sets_order_at_any_world_size(run, start, tmp_path):
    """Three ranks with 120 samples each, in batches of 50: the last one is smaller."""
    three, tables = ["launch=fork", "launch.nproc_per_node=3", "evaluation.batch_size=50", "mode.snapshot=best"], []
    for more in ([], three):
        start(*PYTHON_TRAIN, "mode=predict", f'resume="{run}"', "mode.file=rows.csv", *more).finish()
        with open(tmp_path / "rows.csv") as file:
            head, *rows = csv.reader(file)
        tables.append(rows)
        assert head == ["index", "prediction", *(f"probability_{n}" for n in range(10)), "truth"]
        assert [(int(row[0]), int(row[-1])) for row in rows] == list(enumerate(digits(train=False).targets.tolist()))
    for one, other in zip(*tables, strict=True):
        shares = [float(value) for value in one[2:-1]]
        assert shares == pytest.approx([float(value) for value in other[2:-1]], rel=1e-9)
        assert (one[1], shares[int(one[1])]) == (other[1], max(shares))
    loss = sum(-math.log(float(row[2 + int(row[-1])])) for row in tables[0]) / 360
    assert loss == pytest.approx(last_loss(run), rel=1e-9)


def test_a_loaded_net_gives_what_the_evaluation_computed(run):
    """In this process: no Hydra, no process group."""
    net, best = lockstep.load(run), lockstep.load(str(run), which="best")  # its only evaluation was at the end
    with torch.no_grad():
        outputs = net(images())
    assert mean_loss(outputs) == pytest.approx(last_loss(run), rel=1e-12)
    assert net.predict(images()[:3]) == outputs[:3].argmax(1).tolist()
    assert not net.training
    assert torch.equal(best(images()), outputs)
    with pytest.raises(ConfigError, match="/nothing does not exist; type a run folder"):
        lockstep.load(run / "nothing")


def test_an_exported_net_holds_its_preprocessing_for_any_batch_and_a_full_disk_is_named(run, start, tmp_path):
    words = ["mode=export", f'resume="{run}"', "mode.file=net.pt2"]
    small = Command(["bash", "-c", 'ulimit -f 20; "$@"', "bash", *PYTHON_TRAIN, *words], tmp_path).finish(2)  # 20 KiB
    told = "net.pt2 cannot be written (File too large); type mode.file=<a file that you can write>"
    assert small.sentence.endswith(told)
    assert list(tmp_path.iterdir()) == []
    start(*PYTHON_TRAIN, *words, "mode.snapshot=best").finish()
    exported = torch.export.load(tmp_path / "net.pt2").module()
    assert mean_loss(exported(images())) == pytest.approx(last_loss(run), rel=1e-9)
    assert exported(images()[:1]).shape == (1, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("mode=evaluate", "mode=evaluate needs a trained run; type resume=<a run folder>"),
        ("mode=evaluate resume=x", "resume=x does not exist; type resume=<a run folder"),
        ("mode=evaluate {run} -m", "mode=evaluate is no training, and a sweep trains"),
        ("mode=evaluate {run} model=mlp", "does not fit this run: model._target_ ("),
        ("mode=evaluate {run} mode.snapshot=nope", "nope does not exist; type a run folder or one of its"),
        ("mode=export {run} launch=fork", "mode=export is the work of one process, not of 2"),
    ],
)
def test_what_is_refused(run, start, words, sentence):
    filled = [f'resume="{run}"' if word == "{run}" else word for word in words.split()]
    assert sentence in start(*PYTHON_TRAIN, *filled).finish(2).sentence


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="pip install onnx onnxscript onnxruntime")
def test_an_onnx_file_gives_the_nets_outputs(run, start, tmp_path):
    words = [*PYTHON_TRAIN, "mode=export", f'resume="{run}"', "mode.format=onnx", "mode.file=net.onnx"]
    start(*words, "trainer.precision=fp32").finish()
    session = importlib.import_module("onnxruntime").InferenceSession(tmp_path / "net.onnx")
    for batch in (images(), images()[:1]):
        (outputs,) = session.run(None, {"samples": batch.numpy()})
        assert torch.allclose(torch.from_numpy(outputs), lockstep.load(run)(batch).float(), atol=1e-4)


def test_data_and_a_net_of_the_users_whose_targets_are_numbers(start, tmp_path):
    """A net with more than tensors in its state, trained for one step. In JSON there is no NaN."""
    data = "".join(f"{one}: {{_target_: support.own_data.Values}}\n" for one in ("train", "test"))
    write(tmp_path / "conf" / "dataset" / "values.yaml", f"defaults: [pair]\n{data}")
    net = "{_target_: support.models.Versioned, in_features: 4, out_features: 1}\n"
    write(tmp_path / "conf" / "model" / "versioned.yaml", net)

    def typed(*words, code=0):
        return start(*PYTHON_TRAIN, "--config-dir=conf", "model=versioned", *words).finish(code).output

    folder = tmp_path / "run"
    typed("dataset=values", "task=regression", "trainer.max_steps=1", "trainer.batch_size=1", "hydra.run.dir=run")
    typed("mode=predict", "resume=run")
    rows = list(csv.DictReader((folder / "predictions.csv").open()))
    assert list(rows[0]) == ["index", "prediction", "truth"]
    assert [float(row["truth"]) for row in rows] == pytest.approx([target for _, target in Values()])
    squares = [(float(row["prediction"]) - float(row["truth"])) ** 2 for row in rows]
    loss = json_of(folder / "run.json")["test"]["metrics"]["loss"]
    assert sum(squares) / len(rows) == pytest.approx(loss, rel=1e-5)
    for name, said in (
        ("BrokenValues", "sample 5 of the test data cannot be read (OSError: image file is truncated)"),
        ("NaNValues", "the test loss is nan at step 1; "),
    ):
        words = [f"dataset.test._target_=support.own_data.{name}", f"mode.file={name}.json"]
        assert said in typed("mode=evaluate", "resume=run", "launch=fork", *words, code=1)
        assert not (tmp_path / f"{name}.json").exists()
    typed("mode=export", "resume=run", "+dataset.test.count=1", "mode.file=net.pt2")  # one sample is example enough
    expected = torch.load(folder / "model.pt", weights_only=True)
    module = torch.export.load(tmp_path / "net.pt2").module()
    assert module(torch.zeros(3, 4, dtype=torch.float64)).tolist() == [[expected["bias"].item()]] * 3
