"""What watch.nan does with a batch whose loss or gradient is NaN."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.partition import generator
from lockstep.errors import TrainingDiverged
from lockstep.training.nonfinite import are_finite
from support.commands import ema
from support.configs import composed, with_values
from support.event_files import scalars
from support.run_folders import contents
from support.worlds import delay_exchanges, in_world, train

pytestmark = pytest.mark.whole

BROKEN = 100  # the number of a sample that is NaN
BATCH = 64
SAMPLES = 1437
DATA = ["dataset=pair", *(f"dataset.{half}._target_=support.damage.FloatDigits" for half in ("train", "test"))]
SMALL = ["logger=[tensorboard]", *DATA, f"+dataset.train.broken=[{BROKEN}]"]
SMALL += ["+dataset.train.train=true", "+dataset.test.train=false", "+dataset.test.broken=[]", "trainer.epochs=2"]
NONE_COUNTED = [f"+dataset.train.broken={list(range(SAMPLES))}", "watch.nan=skip", "trainer.batch_size=300"]
NONE_COUNTED += ["trainer.epochs=1", "logging.every=5"]
TEST_BROKEN = ["dataset.train.broken=[]", "dataset.test.broken=[7,9]", "trainer.max_steps=1"]
MARKED = [*SMALL, "model=mlp", "model._target_=support.damage.MarkedMLP", "+dataset.train.value=-1"]


def step_of_sample(number: int, epoch: int, ranks: int) -> tuple[int, int]:
    """(step counted from 1, rank) that trains on a sample."""
    order = torch.randperm(SAMPLES, generator=generator(0, epoch)).tolist()
    place = order.index(number)
    first = place // BATCH * BATCH
    batch = torch.tensor(order[first : first + BATCH])
    (rank,) = [rank for rank, share in enumerate(batch.tensor_split(ranks)) if number in share.tolist()]
    return epoch * -(-SAMPLES // BATCH) + place // BATCH + 1, rank


def _train_all(configs: list[Any]) -> list[str]:
    """The sentence of each run that diverged, "" of the others."""
    ends = []
    for cfg in configs:
        try:
            train(cfg)
            ends.append("")
        except TrainingDiverged as error:
            ends.append(str(error))
    return ends


def test_a_run_stops_at_the_step_and_names_the_samples(tmp_path: Path) -> None:
    every = ["logging.every=1000", "snapshot.every=1steps"]
    configs = [
        composed(f"run_dir={tmp_path / 'loss'}", *SMALL, *every),
        composed(f"run_dir={tmp_path / 'gradient'}", *MARKED, *every),
        with_values(composed(f"run_dir={tmp_path / 'test'}", *SMALL), *TEST_BROKEN),
    ]
    step, rank = step_of_sample(BROKEN, 0, 2)
    # A world for each: a process that has failed is ended 5 s later.
    ends = [[end for (end,) in in_world(2, _train_all, [config])] for config in configs]
    for loss, gradient, test in zip(*ends, strict=True):
        assert loss.startswith(f"the loss is nan at step {step}; NaN or infinite values are in sample {BROKEN}; ")
        assert loss.endswith("or to leave out such batches type watch.nan=skip")
        assert gradient.startswith(f"the weights are not finite at step {step}; ")
        assert gradient.endswith("type optimizer.lr=<smaller> or trainer.max_grad_norm=1.0")  # its inputs are finite
        assert test.startswith("the test loss is nan at step 1; ")
    newest = max(path.stem for path in (tmp_path / "gradient" / "snapshots").glob("step_*[0-9]"))
    assert newest == f"step_{step - 1:08d}"


def test_huge_gradients_are_finite() -> None:
    huge = torch.full((100,), 3e38)
    assert are_finite([torch.ones(3), huge])
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not are_finite([huge, torch.tensor([1.0, value])])
    assert not are_finite([torch.tensor([float("inf"), -float("inf")])])


def _train_as_on_a_gpu(cfg: Any) -> str:
    delay_exchanges()
    return _train_all([cfg])[0]


def test_where_reading_would_wait_the_next_log_finds_the_step(tmp_path: Path) -> None:
    step, _ = step_of_sample(BROKEN, 0, 2)  # 10: the gradient breaks in the step of a log
    cfg = composed(f"run_dir={tmp_path}", *MARKED, "logging.every=5")
    assert step == 10
    for sentence in in_world(2, _train_as_on_a_gpu, cfg):
        assert sentence.startswith("the loss is nan at step 11; ")


@pytest.mark.parametrize("ranks", [1, 2])
def test_skip_leaves_out_the_update_and_nothing_else(tmp_path: Path, ranks: int) -> None:
    step, rank = step_of_sample(BROKEN, 0, ranks)
    every = ["watch.nan=skip", "snapshot.every=1steps", "snapshot.keep_last=100", f"trainer.max_steps={step + 2}"]
    options = [*SMALL, ema(0.9), "logging.every=1", *every]
    many = [option for option in SMALL if "broken" not in option]
    broken = f"+dataset.train.broken={list(range(900))}"
    configs = [
        composed(f"run_dir={tmp_path / 'skip'}", *options),
        composed(f"run_dir={tmp_path / 'skip'}", *options, f"trainer.max_steps={step + 4}"),
        composed(f"run_dir={tmp_path / 'none'}", *many, "+dataset.test.broken=[]", *NONE_COUNTED),
        composed(f"run_dir={tmp_path / 'many'}", *many, "+dataset.test.broken=[]", broken, "watch.nan=skip"),
    ]
    for skip, goes_on, none, everything in in_world(ranks, _train_all, configs):
        assert skip == goes_on == none == ""
        assert "as in the 10 steps before" in everything
    before, after, later = (snapshot(tmp_path / "skip", step + change) for change in (-1, 0, 1))
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


def snapshot(folder: Path, step: int) -> dict[str, Any]:
    saved: dict[str, Any] = contents(folder / "snapshots" / f"step_{step:08d}")
    return saved


def same(one: Any, other: Any) -> bool:
    """Whether two nested dicts and lists hold the same numbers, learning rates aside."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one if key != "param_groups")
    return bool(one == other)
