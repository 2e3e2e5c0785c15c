"""Parameter groups by rule, frozen parameters and initial weights, at several world sizes and strategies."""

import functools

import pytest
import torch
from safetensors.torch import save_file

from lockstep.models.base import matching_parameters
from lockstep.snapshots.files import list_snapshots
from lockstep.snapshots.initial_weights import load_initial_weights
from support.commands import WHOLE
from support.configs import with_values
from support.refusals import accepted
from support.run_folders import newest_snapshot
from support.worlds import distance, in_world, refusals, train_all, weights

OWN_MODULE = """
import torch
from torch import nn

def normed(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, classes))

def by_hand(params, **options):
    "torch's AdamW with the groups written out: weight, bias, norm's weight, norm's bias, head's weight, head's bias."
    weight, bias, norm_weight, norm_bias, head, head_bias = params
    return torch.optim.AdamW([
        {"params": [weight]},
        {"params": [head], "lr": 0.03},
        {"params": [head_bias], "lr": 0.03, "weight_decay": 0.0},
        {"params": [bias, norm_weight, norm_bias], "weight_decay": 0.0},
    ], **options)
"""
BASE = ["model=mlp", "~model.width", "~model.depth", "~model.dropout", "model._target_=own_groups.normed"]
BASE += ["optimizer=adamw", "optimizer.weight_decay=0.5", "optimizer.lr=0.01", "optimizer.fused=false"]
BASE += ["trainer.precision=fp64", "trainer.epochs=2", "scheduler=constant", "logger=[]", "snapshot.every=1epochs"]
RULES = ["parameters.no_decay=[bias,norm]", "parameters.groups=[{match:4,lr:0.03}]"]


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    (tmp_path / "own_groups.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@functools.cache
def config(*words):
    return accepted(*WHOLE, *BASE, *words)


def train(size, *runs):
    """The weights of runs in one world. Each is (folder, the words that are checked, other values)."""
    in_world(size, train_all, [with_values(config(*words), f"run_dir={at}", *values) for at, words, *values in runs])
    return [weights(at) for at, *_ in runs]


def test_groups_by_rule_are_the_groups_written_by_hand_under_every_strategy(tmp_path):
    by_hand, plain = ["optimizer._target_=own_groups.by_hand"], []
    places = {"one": [], "ddp": [], "fsdp": ["strategy=fsdp"], "pipeline": ["strategy=pipeline"]}
    rows = {name: (tmp_path / name, [*RULES, *strategy]) for name, strategy in places.items()}
    hand, plain, one = train(1, (tmp_path / "hand", by_hand), (tmp_path / "plain", plain), rows.pop("one"))
    assert distance(hand, plain) > 1e-2
    for place, found in zip(places, [one, *train(2, *rows.values())], strict=True):
        assert distance(hand, found) < 1e-12, place
    groups = [newest_snapshot(tmp_path / place)["groups"] for place in places]
    found = [[(g["lr"], g["weight_decay"]) for g in of_place] for of_place in groups]
    assert found == [[(0.01, 0.5), (0.01, 0.0), (0.03, 0.5), (0.03, 0.0)]] * len(places)  # in the same order


def test_a_run_begins_with_the_weights_of_another_and_a_new_head(tmp_path):
    first, wide, freeze = tmp_path / "first", tmp_path / "wider", "parameters.freeze=[1,2]"
    train(1, (first, [], "trainer.max_steps=5"))
    trained = torch.load(first / "model.pt", weights_only=True)
    save_file(trained, first / "model.safetensors")
    files = [first / "model.pt", first / "model.safetensors", list_snapshots(first / "snapshots")[0]]
    begun = {tmp_path / f"of_{where.name}": [f"parameters.init={where}", freeze] for where in (first, *files)}
    train(2, *((at, words, "trainer.max_steps=1") for at, words in begun.items()))
    for folder in begun:
        found = torch.load(folder / "model.pt", weights_only=True)
        assert torch.equal(found["1.weight"], trained["1.weight"])
        assert distance(found["4.weight"], trained["4.weight"]) < 0.2  # after one step
    wider = ["model.classes=12", f"parameters.init={first}", "parameters.new_layers=[4]", freeze]
    train(1, (wide, wider, "trainer.max_steps=1"))
    found = torch.load(wide / "model.pt", weights_only=True)
    assert torch.equal(found["1.weight"], trained["1.weight"])
    assert found["4.weight"].shape == (12, 16)
    log = (wide / "train.log").read_text()
    assert f"init: 4 of 6 tensors (1072 numbers) are those of {first / 'model.pt'}" in log
    assert "init: keep their first values: 4.bias, 4.weight" in log
    assert "init: not used: 4.bias, 4.weight" in log
    assert "freeze: 1072 of 1276 weights are not trained: 1.bias, 1.weight, 2.bias, 2.weight" in log


def test_what_does_not_fit_the_model_is_refused_on_all_ranks_with_what_to_type(tmp_path):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Identity(), torch.nn.ReLU())
    torch.save({f"module.{name}": value for name, value in net.state_dict().items()}, tmp_path / "body.pt")
    cases = [
        ("init", f"{tmp_path}/none.pt", "none.pt does not exist; type a run folder or one of"),
        ("init", f"{tmp_path}", "holds no finished snapshot; type a run folder"),
        ("init", f"{tmp_path}/body.pt", 'Missing key(s) in state_dict: "2.weight", "2.bias", "4.weight", "4.bias".'),
        ("init", f"{tmp_path}/body.pt", "type parameters.new_layers=[<the layers that shall begin with random w"),
        ("freeze", "[head]", "freeze: the model has no head; the nearest names are 1, 1.weight, 1.bias; type one"),
        ("no_decay", "[layer9]", "parameters.no_decay: the model has no layer9; the nearest names are"),
        ("groups", "[{match:'4',momentum:0.5}]", "parameters.groups: AdamW has no momentum, but lr, betas, eps"),
    ]
    configs = [
        with_values(config(f"parameters.{key}={value}", "strategy=pipeline"), f"run_dir={tmp_path / str(number)}")
        for number, (key, value, _) in enumerate(cases)
    ]
    for found in in_world(2, refusals, configs):
        for (key, value, said), sentence in zip(cases, found, strict=True):
            assert said in sentence, (key, value)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16))
    load_initial_weights(model, str(tmp_path / "body.pt"), [])
    assert torch.equal(model[1].weight, net[1].weight)


def test_patterns_name_parameters_by_kind_module_and_wildcard():
    block = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1))
    net = torch.nn.ModuleDict({"layer1": block, "layer10": torch.nn.Linear(1, 1), "layernorm": torch.nn.Linear(1, 1)})
    assert matching_parameters(net, "bias") == {"layer1.0.bias", "layer1.1.bias", "layer10.bias", "layernorm.bias"}
    assert matching_parameters(net, "norm") == {"layer1.1.weight", "layer1.1.bias"}
    assert matching_parameters(net, "layer1") == {f"layer1.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}
    assert matching_parameters(net, "layer*.weight") >= {"layer1.0.weight", "layer10.weight"}
    assert matching_parameters(net, "*.1") == {"layer1.1.weight", "layer1.1.bias"}
