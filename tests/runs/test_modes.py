"""What a trained run is used for: mode=evaluate and its like, as whole commands."""

import csv
import importlib
import importlib.util
import json
import math
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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run in float64, whose last evaluation is its only one."""
    folder = tmp_path_factory.mktemp("trained") / "it's a run"
    quoted = str(folder).replace("'", "\\'")
    words = [*WHOLE, *TRAINED, "evaluation.every=2", f"hydra.run.dir='{quoted}'"]
    Command([*PYTHON_TRAIN, *words], folder.parent).finish()
    return folder


@pytest.fixture
def typed(start):
    """typed(*words, code=0) -> a finished `python src/train.py`."""
    return lambda *words, code=0, **env: start(*PYTHON_TRAIN, *words, **env).finish(code)


def json_of(path):
    return json.loads(path.read_text())


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def last_loss(run):
    """What the run itself measured at its end, to the last digit."""
    return json_of(run / "run.json")["objective"]["last"]


def images():
    return digits(train=False).inputs


def mean_loss(outputs):
    return float(F.cross_entropy(outputs.detach().double(), digits(train=False).targets))


def test_evaluation_gives_the_numbers_of_the_training_and_changes_no_file(run, typed, tmp_path):
    def files():
        found = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
        return {name: path.read_bytes() for name, path in found.items() if not name.startswith("evaluate/")}

    before = files()
    words = ["mode=evaluate", f'resume="{run}"', "launch=fork", "mode.file=found.json"]
    assert f"test loss {last_loss(run):.4f}" in typed(*words).output
    found = json_of(tmp_path / "found.json")
    assert found["metrics"]["loss"] == pytest.approx(last_loss(run), rel=1e-12)
    assert (found["ranks"], found["samples"]) == (2, 360)
    assert files() == before
    assert not list(tmp_path.glob("outputs"))


def test_a_mode_of_the_users_own(run, typed):
    words = ["mode._target_=my_mode.Confused", "+mode.snapshot=last", f'resume="{run}"', "launch=fork"]
    output = typed(*words, PYTHONPATH=ROOT / "docs" / "examples").output
    (counts,) = re.findall(r"confused: \[(.*)\]", output)
    assert 0 < sum(map(int, counts.split(", "))) < 36


def test_predictions_are_in_the_data_sets_order_at_any_world_size(run, typed, tmp_path):
    """Three ranks with 120 samples each, in batches of 50: the last one is smaller."""
    three, tables = ["launch=fork", "launch.nproc_per_node=3", "evaluation.batch_size=50", "mode.snapshot=best"], []
    for more in ([], three):
        typed("mode=predict", f'resume="{run}"', "mode.file=rows.csv", *more)
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


def test_an_exported_net_holds_its_preprocessing_for_any_batch_and_a_full_disk_is_named(run, typed, tmp_path):
    words = ["mode=export", f'resume="{run}"', "mode.file=net.pt2"]
    small = Command(["bash", "-c", 'ulimit -f 20; "$@"', "bash", *PYTHON_TRAIN, *words], tmp_path).finish(2)  # 20 KiB
    told = "net.pt2 cannot be written (File too large); type mode.file=<a file that you can write>"
    assert small.sentence.endswith(told)
    assert list(tmp_path.iterdir()) == []
    typed(*words, "mode.snapshot=best")
    exported = torch.export.load(tmp_path / "net.pt2").module()
    assert mean_loss(exported(images())) == pytest.approx(last_loss(run), rel=1e-9)
    assert exported(images()[:1]).shape == (1, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]


def test_what_is_refused(run, typed):
    for words, sentence in (
        (["mode=evaluate", "-m"], "mode=evaluate is no training, and a sweep trains"),
        (["mode=evaluate", "model=mlp"], "does not fit this run: model._target_ ("),
        (["mode=evaluate", "mode.snapshot=nope"], "nope does not exist; type a run folder or one of its"),
        (["mode=export", "launch=fork"], "mode=export is the work of one process, not of 2"),
    ):
        assert sentence in typed(f'resume="{run}"', *words, code=2).sentence


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="pip install onnx onnxscript onnxruntime")
def test_an_onnx_file_gives_the_nets_outputs(run, typed, tmp_path):
    words = ["mode=export", f'resume="{run}"', "mode.format=onnx", "mode.file=net.onnx", "trainer.precision=fp32"]
    typed(*words)
    session = importlib.import_module("onnxruntime").InferenceSession(tmp_path / "net.onnx")
    for batch in (images(), images()[:1]):
        (outputs,) = session.run(None, {"samples": batch.numpy()})
        assert torch.allclose(torch.from_numpy(outputs), lockstep.load(run)(batch).float(), atol=1e-4)


def test_data_and_a_net_of_the_users_whose_targets_are_numbers(typed, tmp_path):
    """A net with more than tensors in its state, trained for one step. In JSON there is no NaN."""
    data = "".join(f"{one}: {{_target_: support.own_data.Values}}\n" for one in ("train", "test"))
    write(tmp_path / "conf" / "dataset" / "values.yaml", f"defaults: [pair]\n{data}")
    net = "{_target_: support.models.Versioned, in_features: 4, out_features: 1}\n"
    write(tmp_path / "conf" / "model" / "versioned.yaml", net)
    own, folder = ["--config-dir=conf", "model=versioned"], tmp_path / "run"
    first = ["dataset=values", "task=regression", "trainer.max_steps=1", "trainer.batch_size=1", "hydra.run.dir=run"]
    for words in (first, ["mode=predict", "resume=run"]):
        typed(*own, *words)
    rows = list(csv.DictReader((folder / "predictions.csv").open()))
    assert list(rows[0]) == ["index", "prediction", "truth"]
    assert [float(row["truth"]) for row in rows] == pytest.approx([target for _, target in Values()])
    squares = [(float(row["prediction"]) - float(row["truth"])) ** 2 for row in rows]
    loss = json_of(folder / "run.json")["test"]["metrics"]["loss"]
    assert sum(squares) / len(rows) == pytest.approx(loss, rel=1e-5)
    for name, said in (
        ("BrokenValues", "sample 5 of the test data cannot be read (OSError: image file is truncated)"),
        ("NaNValues", "the test loss is nan at step 1, from weights, data or a batch of one"),
    ):
        words = [f"dataset.test._target_=support.own_data.{name}", f"mode.file={name}.json", "launch=fork"]
        assert said in typed(*own, "mode=evaluate", "resume=run", *words, code=1).output
        assert not (tmp_path / f"{name}.json").exists()
    one = "+dataset.test.count=1"  # one sample is example enough
    typed(*own, "mode=export", "resume=run", one, "mode.file=net.pt2")
    expected = torch.load(folder / "model.pt", weights_only=True)
    module = torch.export.load(tmp_path / "net.pt2").module()
    assert module(torch.zeros(3, 4, dtype=torch.float64)).tolist() == [[expected["bias"].item()]] * 3


OF_TEXT = ["dataset=text", "dataset.path=text.txt", "dataset.classes=4", "dataset.block=8", "dataset.tokens_dir=tokens"]
OF_TEXT += ["model.width=16", "model.heads=2", "model.layers=1", "optimizer=adamw", "optimizer.lr=0.01", "logger=[]"]
OF_TEXT += ["trainer.batch_size=16", "trainer.epochs=12", "hydra.run.dir=run", "loader.validation=0.1"]


def test_a_model_of_a_text_goes_on_with_a_prompt_in_the_same_way_for_a_seed(typed, tmp_path):
    def sampled(*more, code=0):
        output = typed("mode=sample", "resume=run", "mode.prompt=abca", "mode.length=20", *more, code=code).output
        return next((line for line in output.splitlines() if line.startswith("abca")), output)

    text, words = tmp_path / "text.txt", "abcabcabd" * 60
    text.write_text(words)
    typed(*OF_TEXT)
    likeliest = sampled("mode.temperature=0")
    assert len(likeliest) == 24
    assert likeliest.startswith("abcab")  # b always follows a
    assert likeliest == sampled("mode.top_k=1", "mode.seed=5")
    assert likeliest == sampled("mode.temperature=1e-39")  # logits divided by it are infinite
    assert likeliest != sampled("mode.temperature=50", "mode.seed=1")
    refused = sampled("mode.prompt=xyz", code=2)
    assert "the text has no 'x'" in refused
    assert "type mode.prompt=<" in refused
    assert "type launch=env" in sampled("launch=fork", code=2)
    text.write_text(words.replace("d", "x"))  # the token numbers stay, and are other characters
    assert "class 3 is d in the training and x in this data" in sampled(code=2)
    text.write_text(words[::-1])
    assert "the test data is not that of the training: it was " in typed("mode=evaluate", "resume=run").output
    (tokens,) = lockstep.load(tmp_path / "run").predict(torch.zeros(1, 8, dtype=torch.int64))
    assert len(tokens) == 8
