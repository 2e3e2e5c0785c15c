"""mode=find_lr: the rate rises, the loss falls and diverges, and one rate is suggested."""

import re
import shlex
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lockstep.data.partition import seeded
from lockstep.models.tutorial import mlp
from lockstep.modes.find_lr import smoothed
from support.commands import PYTHON_TRAIN, Command
from support.digits import digits
from support.event_files import scalars
from support.reference import train_reference

pytestmark = pytest.mark.whole

FIND = ["loader.validation=null", "mode=find_lr", "model=mlp", "trainer.precision=fp64", "logger=[]"]


def suggestion(command):
    """{key: rate} of the words that it says to type."""
    (line,) = re.findall("^type (.*)$", command.output, re.MULTILINE)
    return {key: float(value) for key, _, value in (word.partition("=") for word in shlex.split(line))}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return Command([*PYTHON_TRAIN, *FIND, "hydra.run.dir=found"], tmp_path_factory.mktemp("one")).finish()


def test_the_curve_is_that_of_plain_torch(found):
    data = digits(train=True)
    images = ((data.inputs.double() / 255) - 0.287) / 0.353
    with seeded(0):
        model = mlp(shape=[1, 8, 8], classes=10, width=128, depth=2, dropout=0.0).double()
    curves = scalars(found.cwd / "found")
    losses, rates = ([value for _, value in curves[f"find_lr/{name}"]] for name in ("loss", "lr"))
    steps = {"epochs": 10, "batch_size": 64, "max_steps": len(losses)}
    steps["lr_factor"] = lambda step: 1e-6 / 0.05 * 1e7 ** (step / 199)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    reference = train_reference(model, (images, data.targets), F.cross_entropy, sgd, **steps)
    assert losses == pytest.approx(reference.losses, rel=1e-6)
    assert rates == pytest.approx([1e-6 * 1e7 ** (n / 199) for n in range(len(losses))])
    assert len(losses) < 200  # it ends where the loss diverges
    assert sum(losses[-10:]) / 10 > 2 * sum(losses[:10]) / 10 >= sum(losses[-11:-1]) / 10
    curve = smoothed(reference.losses)
    lowest = curve.index(min(curve))
    assert suggestion(found) == {"optimizer.lr": float(f"{1e-6 * 1e7 ** (lowest / 199) / 3:.2g}")}


def test_ranks_find_the_same_and_it_leaves_curves_and_no_run(found, train):
    two = train(*FIND, "launch=fork", "launch.nproc_per_node=2", "hydra.run.dir=found")
    assert suggestion(two) == suggestion(found)
    ours, theirs = (torch.tensor(scalars(each.cwd / "found")["find_lr/loss"]) for each in (two, found))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    folder = found.cwd / "found"
    names = {path.relative_to(folder).parts[0] for path in folder.rglob("*")}
    assert {name for name in names if not name.startswith("events.")} == {".lock", "logs", "train.log"}
    assert "type a run folder" in train(f"resume={folder}", code=2).sentence


def test_all_rates_of_an_optimizer_are_scaled_by_the_same_factor(train):
    rates = {"optimizer.lr": 0.02, "optimizer.others.lr": 0.002}
    words = ["optimizer=muon", *(f"{key}={rate}" for key, rate in rates.items())]
    found = train(*FIND, *words, "parameters.groups=[{match:1,lr:0.04}]")
    (factor,) = re.findall(r"^and multiply each lr of parameters\.groups by ([\d.e-]+)$", found.output, re.MULTILINE)
    assert suggestion(found) == pytest.approx({key: rate * float(factor) for key, rate in rates.items()}, rel=0.05)


def test_what_cannot_be_searched_is_one_sentence(train):
    said = "mode=find_lr scales the rates from optimizer.lr; type optimizer.lr=0.1"
    assert said in train("mode=find_lr", "~optimizer.lr", code=2).sentence
    sentence = train(*FIND, "mode.max_lr=1e-5", code=2).sentence
    assert "the loss does not fall by more than batches differ from optimizer.lr=1e-06 to 1e-05" in sentence
    assert sentence.endswith("or mode.max_lr=0.001")
