"""What watch.nan does with a batch whose loss or gradient is NaN; and weights that differ between ranks: they are
found, named, and kept out of snapshots."""

import pytest
import torch

from lockstep.data.partition import generator
from lockstep.errors import RanksDiffer, TrainingDiverged
from lockstep.training.nonfinite import are_finite
from support.commands import STARTERS, ema
from support.configs import composed
from support.digits import FEW
from support.event_files import scalars
from support.run_folders import contents
from support.small_text import small_gpt
from support.worlds import delay_exchanges, in_world, train


def train_all(configs):
    """The sentence that ends each run, or "". A run that ends with RanksDiffer is the last one of its ranks."""
    ends = []
    for config in configs:
        try:
            train(config)
            ends.append("")
        except (RanksDiffer, TrainingDiverged) as error:
            ends.append(str(error))
    return ends


BROKEN, BATCH, SAMPLES = 100, 64, 1437  # BROKEN: the number of a sample that is NaN
DATA = ["dataset=pair", "logger=[tensorboard]", "trainer.epochs=2"]
DATA += [f"dataset.{half}._target_=support.damage.FloatDigits" for half in ("train", "test")]
DATA += ["+dataset.train.train=true", "+dataset.test.train=false"]
SMALL = [*DATA, "+dataset.test.broken=[]", f"+dataset.train.broken=[{BROKEN}]"]
MARKED = [*SMALL, "model=mlp", "model._target_=support.damage.MarkedMLP", "+dataset.train.value=-1"]


def step_of_sample(number):
    """The step, counted from 1, that trains on a sample."""
    return torch.randperm(SAMPLES, generator=generator(0, 0)).tolist().index(number) // BATCH + 1


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


def test_skip_leaves_out_the_update_and_nothing_else(tmp_path):
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
    for *ended, everything in in_world(2, train_all, configs):
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


FEW_DIGITS = ["model=mlp", "model.width=16", "logger=[]", FEW, "trainer.batch_size=16", "trainer.epochs=2"]


def damaged(rank, at_step, parameter, change):
    options = {"rank": rank, "at_step": at_step, "parameter": parameter, "change": change}
    words = ["optimizer._target_=support.damage.DamagedSGD", "++optimizer.fused=null"]
    return [*words, *(f"+optimizer.{key}={value}" for key, value in options.items())]


def test_a_damaged_weight_of_one_rank_is_named_and_kept_out_of_snapshots(tmp_path):
    saves = "snapshot.every=12steps"
    rows = {
        "first": [*damaged(0, 14, 3, "bit"), saves, "watch.weights_every=10"],
        "off": [*damaged(1, 3, 1, 5.0), "watch.weights_every=0"],
        "whole": [*damaged(1, 1000, 1, 5.0), "watch.weights_every=1", ema(0.9)],
        "save": [*damaged(2, 7, 0, 5.0), saves, "watch.weights_every=1000"],
    }
    first, *others = [composed(f"run_dir={tmp_path / name}", *FEW_DIGITS, *words) for name, words in rows.items()]
    for (stopped,) in in_world(3, train_all, [first]):
        assert stopped.startswith(
            "the weights differ between ranks at step 20: rank 1 has other values in 4.bias than rank 0; rank 2 has "
            "other values in 4.bias than rank 0; type the command again to go on from the last snapshot"
        )
    for *went_on, save in in_world(3, train_all, others):
        assert save.startswith("the weights differ between ranks at step 12: rank 2 has other values in 1.weight than")
        assert went_on == ["", ""]
    assert sorted(path.name for path in (tmp_path / "first" / "snapshots").iterdir()) == ["step_00000012"]
    assert not list((tmp_path / "save").glob("snapshots/*/state.pt"))


@pytest.mark.parametrize(("strategy", "parameter"), [("fsdp", "1.weight than rank"), ("tensor_parallel", "block1.at")])
def test_copies_of_a_part_are_compared(tmp_path, strategy, parameter):
    words = [f"strategy={strategy}", "strategy.replicate=2", "watch.weights_every=2", f"run_dir={tmp_path / 'run'}"]
    if strategy == "fsdp":
        words += [*FEW_DIGITS, *damaged(3, 2, 0, "bit")]
    else:
        text = small_gpt(tmp_path, "trainer.precision=fp32")
        words = [word for word in text if word != "optimizer=adamw"] + words + damaged(3, 2, 3, "bit")
    for (sentence,) in in_world(4, train_all, [composed(*words)]):
        said = f"the weights differ between ranks at step 2: rank 3 has other values in {parameter}"
        assert sentence.startswith(said)


def test_two_ranks_stop_and_the_command_ends_with_one_sentence(start):
    run = start(*STARTERS["launch=fork"], "watch.weights_every=5", *FEW_DIGITS, *damaged(1, 6, 1, 5.0)).finish(1)
    assert "rank 1 has other values in 1.bias than rank 0" in run.sentence
    assert "Traceback" not in run.output
