"""What watch.nan does with a batch whose loss or gradient is NaN."""

import pytest
import torch

from lockstep.data.partition import generator
from lockstep.errors import TrainingDiverged
from lockstep.training.nonfinite import are_finite
from support.commands import ema
from support.configs import composed
from support.event_files import scalars
from support.run_folders import contents
from support.worlds import delay_exchanges, in_world, train

BROKEN, BATCH, SAMPLES = 100, 64, 1437  # BROKEN: the number of a sample that is NaN
DATA = ["dataset=pair", "logger=[tensorboard]", "trainer.epochs=2"]
DATA += [f"dataset.{half}._target_=support.damage.FloatDigits" for half in ("train", "test")]
DATA += ["+dataset.train.train=true", "+dataset.test.train=false"]
SMALL = [*DATA, "+dataset.test.broken=[]", f"+dataset.train.broken=[{BROKEN}]"]
MARKED = [*SMALL, "model=mlp", "model._target_=support.damage.MarkedMLP", "+dataset.train.value=-1"]


def step_of_sample(number):
    """The step, counted from 1, that trains on a sample."""
    return torch.randperm(SAMPLES, generator=generator(0, 0)).tolist().index(number) // BATCH + 1


def train_all(configs):
    """The sentence of each run that diverged, "" of the others."""
    ends = []
    for cfg in configs:
        try:
            train(cfg)
            ends.append("")
        except TrainingDiverged as error:
            ends.append(str(error))
    return ends


def test_a_run_stops_at_the_step_and_names_the_samples(tmp_path):
    every, step = ["logging.every=1000", "snapshot.every=1steps"], step_of_sample(BROKEN)
    broken_test = [*DATA, "+dataset.train.broken=[]", "+dataset.test.broken=[7,9]", "trainer.max_steps=1"]
    rows = {"loss": [*SMALL, *every], "gradient": [*MARKED, *every], "test": broken_test}
    configs = [composed(f"run_dir={tmp_path / name}", *words) for name, words in rows.items()]
    # A world for each: a process that has failed is ended 5 s later.
    ends = [[end for (end,) in in_world(2, train_all, [config])] for config in configs]
    for loss, gradient, test in zip(*ends, strict=True):
        assert loss.startswith(f"the loss is nan at step {step}; NaN or infinite values are in sample {BROKEN}; ")
        assert loss.endswith("or to leave out such batches type watch.nan=skip")
        assert gradient.startswith(f"the weights are not finite at step {step}; ")
        assert gradient.endswith("type optimizer.lr=<smaller> or trainer.max_grad_norm=1.0")  # its inputs are finite
        assert test.startswith("the test loss is nan at step 1, from weights, data or a batch of one")
    newest = max(path.stem for path in (tmp_path / "gradient" / "snapshots").glob("step_*[0-9]"))
    assert newest == f"step_{step - 1:08d}"


def test_huge_gradients_are_finite():
    huge = torch.full((100,), 3e38)
    assert are_finite([torch.ones(3), huge])
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not are_finite([huge, torch.tensor([1.0, value])])
    assert not are_finite([torch.tensor([float("inf"), -float("inf")])])


def train_as_on_a_gpu(cfg):
    delay_exchanges()
    return train_all([cfg])[0]


def test_where_reading_would_wait_the_next_log_finds_the_step(tmp_path):
    assert step_of_sample(BROKEN) == 10  # the gradient breaks in the step of a log
    for sentence in in_world(2, train_as_on_a_gpu, composed(f"run_dir={tmp_path}", *MARKED, "logging.every=5")):
        assert sentence.startswith("the loss is nan at step 11; ")


@pytest.mark.parametrize("ranks", [1, 2])
def test_skip_leaves_out_the_update_and_nothing_else(tmp_path, ranks):
    step, skip = step_of_sample(BROKEN), "watch.nan=skip"
    every = [ema(0.9), "logging.every=1", "snapshot.every=1steps", "snapshot.keep_last=100"]
    many = [*DATA, "+dataset.test.broken=[]"]
    none = ["trainer.batch_size=300", "trainer.epochs=1", "logging.every=5", "trainer.gradient_accumulation_steps=70"]
    configs = [
        composed(f"run_dir={tmp_path / name}", skip, *words)
        for name, words in (
            ("skip", [*SMALL, *every, f"trainer.max_steps={step + 2}"]),
            ("skip", [*SMALL, *every, f"trainer.max_steps={step + 4}"]),
            ("none", [*many, f"+dataset.train.broken={list(range(SAMPLES))}", *none]),
            ("many", [*many, f"+dataset.train.broken={list(range(900))}"]),
        )
    ]
    for *ended, everything in in_world(ranks, train_all, configs):
        assert ended == ["", "", ""]
        assert "as in the 10 steps before" in everything
    folder = tmp_path / "skip" / "snapshots"
    before, after, later = (contents(folder / f"step_{step + change:08d}") for change in (-1, 0, 1))
    for part in ("model", "optimizer", "ema"):
        assert same(before[part], after[part])
        assert not same(after[part], later[part])
    assert (before["progress"]["step"], after["progress"]["step"]) == (step - 1, step)
    assert before["meter"]["totals"].tolist() == after["meter"]["totals"].tolist()
    points = dict(scalars(tmp_path / "skip")["watch/skipped_steps"])
    assert [points[number] for number in (step - 1, step, step + 2, step + 4)] == [0, 1, 1, 1]
    log = (tmp_path / "skip" / "train.log").read_text()
    assert log.count(f"the gradient is not finite at step {step}") == 1
    assert log.count("the update of this step is left out") == 1
    curves = scalars(tmp_path / "none")
    assert curves["watch/skipped_steps"] == [(5, 5)]
    assert "test/loss" in curves
    assert curves.keys().isdisjoint({"train/loss", "train/accuracy", "train/running_loss"})


def same(one, other):
    """Whether two nested dicts and lists hold the same numbers, learning rates aside."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one if key != "param_groups")
    return bool(one == other)
