"""Parts of modes, without a command: what they write, what a loaded net takes, nets as files of torch.export, and the
weights that a run leaves at its end."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.data.loader import InputConverter
from lockstep.errors import ConfigError
from lockstep.models.gpt import gpt
from lockstep.modes.base import TrainedRun
from lockstep.modes.export import net_as, require_same_outputs
from lockstep.modes.predict import table
from lockstep.modes.trained_net import TrainedNet
from lockstep.tasks.tasks import MultiLabel, Regression
from support.commands import ema
from support.configs import composed, with_values
from support.worlds import in_world, train_all

PLAIN = InputConverter(torch.float32)


def test_a_mode_replaces_nothing_that_is_no_file(tmp_path):
    trained = SimpleNamespace(folder=tmp_path)
    for place in ("/dev/null", str(tmp_path)):
        with pytest.raises(ConfigError, match="is no file.*; type mode.file=<a file that you can"):
            TrainedRun.output(trained, place, "rows.csv")
    assert TrainedRun.output(trained, str(tmp_path / "new" / "rows.csv"), "") == tmp_path / "new" / "rows.csv"
    assert (tmp_path / "new").is_dir()


def test_names_of_classes_stand_for_predictions_and_targets_only():
    """A column of the user's, such as the length of a text, holds numbers."""
    numbers = torch.tensor([1, 0])
    columns = {"prediction": numbers, "length": numbers, "sure": numbers == 0, "truth": torch.tensor([1, -100])}
    rows = table(columns, ["cat", "dog"]).to_csv()
    assert rows == ",prediction,length,sure,truth\n0,dog,1,False,dog\n1,cat,0,True,\n"
    wide = {"prediction": numbers == 0, "probability": torch.full((2, 2), 0.1, dtype=torch.bfloat16)}
    rows = table(wide, ["cat", "dog"]).to_csv()
    assert rows.startswith(",prediction,probability_cat,probability_dog\n0,False,0.100097656,0.100097656\n")


def test_a_net_takes_arrays_and_lists_and_predicts_what_its_task_says():
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    net = TrainedNet(layers, InputConverter(torch.float32, mean=[0.25], std=[0.5]), "bf16", ["a", "b", "c"])
    images = torch.randint(0, 256, (5, 1, 2, 2), dtype=torch.uint8)
    classes = net.predict(images)
    assert net.predict(images.numpy()) == net.predict(list(images)) == net.predict(list(images.numpy())) == classes
    assert isinstance(net(np.zeros((2, 1, 2, 2), dtype=np.uint8)), torch.Tensor)
    values = torch.tensor([[1.5], [-2.0]])
    assert TrainedNet(nn.Identity(), PLAIN, "fp32", task=Regression).predict(values) == values.tolist()
    labels = TrainedNet(nn.Identity(), PLAIN, "fp32", ["a", "b"], task=MultiLabel).predict(torch.eye(2) - 0.5)
    assert labels == [[1, 0], [0, 1]]


def test_an_exported_net_takes_any_number_of_tokens_and_one_sample_is_example_enough():
    net = gpt(shape=[12], classes=7, layers=1, heads=2, width=8, dropout=0.0, tied=False, variant="gpt2")
    tokens, image = torch.randint(0, 7, (5, 12)), torch.randint(0, 256, (1, 1, 2, 2), dtype=torch.uint8)
    cuts = [tokens[:rows, :length] for rows, length in ((1, 12), (3, 5), (2, 1))]
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    for made, samples, others in ((net, tokens, cuts), (layers, image, [image.expand(7, 1, 2, 2)])):
        trained = TrainedNet(made, PLAIN, "fp32", [])
        program = torch.export.load(io.BytesIO(net_as(trained, samples, "torch_export"))).module()
        for other in others:
            torch.testing.assert_close(program(other), trained(other))


def test_outputs_with_nan_are_the_same_as_outputs_with_nan():
    ours = torch.tensor([1.0, torch.nan, torch.inf])
    require_same_outputs(ours, ours.clone(), "onnx")
    heads = {"left": torch.zeros(2), "right": (torch.ones(3), torch.empty(0))}
    require_same_outputs(heads, [torch.zeros(2), torch.ones(3), torch.empty(0)], "onnx")
    others = [ours.clone().index_fill_(0, torch.tensor(place), value) for place, value in ((0, 1.1), (0, torch.nan))]
    for one, other in [(heads, [torch.zeros(2), torch.ones(3)]), *((ours, other) for other in others)]:
        with pytest.raises(AssertionError, match="other outputs|length of the sequences"):
            require_same_outputs(one, other, "onnx")


def test_the_best_weights_have_a_file_of_their_own_if_they_are_not_the_last(tmp_path):
    """An optimizer that makes the loss larger: the best evaluation is the first one."""
    words = ["model=linear", "optimizer=adamw", "optimizer.fused=false", ema(0.9), "logger=[]", "strategy=fsdp"]
    base = composed(*words, "+optimizer.maximize=true", "monitor=val/loss", "trainer.epochs=2", whole=False)
    worse, best = (with_values(base, f"run_dir={tmp_path / name}") for name in ("worse", "best"))
    in_world(2, train_all, [worse, with_values(best, "trainer.pause_after=1")])
    files = {name: sorted(path.name for path in (tmp_path / name).glob("*.pt")) for name in ("worse", "best")}
    assert files == {"worse": ["model.pt", "model_best.pt"], "best": ["model.pt"]}
    places = ("worse/model.pt", "worse/model_best.pt", "best/model.pt")
    last, first, expected = (torch.load(tmp_path / place, weights_only=True) for place in places)
    loaded = lockstep.load(tmp_path / "worse", which="best").net.state_dict()
    assert last.keys() == first.keys() == expected.keys() == loaded.keys()
    for name in first:
        assert torch.equal(first[name], expected[name]), name
        assert torch.equal(first[name], loaded[name]), name
        assert not torch.equal(first[name], last[name]), name
    # A rank that died while it wrote the best snapshot has left that of another step.
    (snapshot,) = (tmp_path / "worse" / "snapshots").glob("best_*")
    snapshot.rename(snapshot.with_name("best_00000099"))
    (tmp_path / "worse" / "model.pt").unlink()
    in_world(2, train_all, [worse])
    assert sorted(path.name for path in (tmp_path / "worse").glob("*.pt")) == ["model.pt"]
