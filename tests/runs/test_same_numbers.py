"""The same numbers at any world size: whole trainings of the convolutional net and the MLP in float64."""

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from support.commands import ON_TEST, ema
from support.configs import composed, with_values
from support.event_files import scalars
from support.worlds import distance, in_world, train, train_all, weights

BASE = [ON_TEST, "trainer.epochs=2", "trainer.batch_size=61", "trainer.precision=fp64", "logger=[]"]
RUNS = {
    "sync_bn": ["sync_bn=on", "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}"],
    "accumulation": ["sync_bn=on", "trainer.gradient_accumulation_steps=3", "optimizer=adamw"],
    "lazy": ["model._target_=support.models.lazy_layers", "sync_bn=on"],
    "lazy in parts": [
        "model._target_=support.models.lazy_layers",
        "sync_bn=on",
        "strategy=fsdp",
        "optimizer.fused=false",
    ],
    "dropout": ["model=mlp", "model.dropout=0.3", "trainer.gradient_accumulation_steps=2"],
    "dropout in parts": ["model=mlp", "model.dropout=0.3", "strategy=fsdp"],
    "drawn": ["model._target_=support.models.Drawing", "optimizer._target_=support.models.Langevin"],
    "mlp": ["model=mlp", "trainer.max_grad_norm=0.5", "scheduler=one_cycle", ema(0.9)],
}


def test_training_ends_in_the_same_weights_on_one_two_and_three_ranks(tmp_path: Path) -> None:
    answers: dict[int, list[float]] = {}
    for size in (1, 2, 3):
        of_ranks = in_world(size, train_all, [config(tmp_path, size, name) for name in RUNS])
        assert all(objectives == of_ranks[0] for objectives in of_ranks)
        answers[size] = of_ranks[0]
    assert answers[1] == answers[2] == answers[3]
    for name in RUNS:
        alone = weights(tmp_path / name / "1")
        assert max(distance(alone, weights(tmp_path / name / str(size))) for size in (2, 3)) < 1e-9, name


def config(folder: Path, size: int, name: str) -> Any:
    return composed(f"run_dir={folder / name / str(size)}", *BASE, *RUNS[name])


@pytest.mark.parametrize(
    "option",
    [
        "trainer.precision=bf16",
        "trainer.precision=fp16",
        "trainer.channels_last=false",
        "sync_bn=off",
        "model=resnet18",
    ],
)
def test_options_learn_on_two_ranks(tmp_path: Path, option: str) -> None:
    steps = "trainer.max_steps=20"
    in_world(2, train, composed(f"run_dir={tmp_path}", option, steps, "logger=[tensorboard]", "logging.every=1"))
    losses = [loss for _, loss in scalars(tmp_path)["train/running_loss"]]
    assert losses[0] == pytest.approx(2.3, abs=0.6)  # -ln(1/10)
    assert losses[-1] < 0.7 * losses[0]


def test_ranks_whose_configs_differ_are_refused_by_the_key(tmp_path: Path) -> None:
    answers = in_world(2, train_with_another_batch_size, composed(f"run_dir={tmp_path}"))
    assert all(
        "trainer.batch_size differs between ranks: 64 on rank 0 and 65 on rank 1" in answer for answer in answers
    )


def train_with_another_batch_size(cfg: Any) -> str:
    cfg = with_values(cfg, f"trainer.batch_size={cfg.trainer.batch_size + int(os.environ['RANK'])}")
    with pytest.raises(ConfigError) as error:
        train(cfg)
    return str(error.value)
