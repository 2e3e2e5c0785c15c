"""Weights that differ between ranks are found, named, and kept out of snapshots."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import RanksDiffer
from lockstep.training.exchange import hash_of
from support.commands import STARTERS, Command, ema
from support.configs import composed
from support.digits import FEW
from support.small_text import small_gpt
from support.worlds import in_world, train

SMALL = ["model=mlp", "model.width=16", "logger=[]", FEW, "trainer.batch_size=16", "trainer.epochs=2"]
SGD = ["optimizer._target_=support.damage.DamagedSGD", "++optimizer.fused=null"]


def damaged(rank: int, at_step: int, parameter: int, change: float | str) -> list[str]:
    options = {"rank": rank, "at_step": at_step, "parameter": parameter, "change": change}
    return [*SMALL, *SGD, *(f"+optimizer.{key}={value}" for key, value in options.items())]


def train_all(configs: list[Any]) -> list[str]:
    """The sentence of each run that ends with RanksDiffer, and "" for the others. Such a run is the last one of its
    ranks."""
    sentences = []
    for cfg in configs:
        try:
            train(cfg)
            sentences.append("")
        except RanksDiffer as error:
            sentences.append(str(error))
    return sentences


def test_a_hash_changes_with_every_bit() -> None:
    random.seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        tensor = torch.randn(3, 5, 7, 11).mul(100).to(dtype)
        before = hash_of(tensor).item()
        values = tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        for bit in range(8 * dtype.itemsize):
            flipped, index = torch.tensor(1, dtype=values.dtype) << bit, random.randrange(len(values))
            values[index] ^= flipped
            assert hash_of(tensor).item() != before, (dtype, bit)
            values[index] ^= flipped
        assert hash_of(tensor).item() == before
    assert hash_of(torch.tensor(0.0)).item() != hash_of(torch.tensor(-0.0)).item()
    image = torch.randn(2, 3, 4, 4)
    assert hash_of(image).item() == hash_of(image.to(memory_format=torch.channels_last)).item()
    assert hash_of(torch.empty(0)).item() == 0
    assert hash_of(torch.ones(3, dtype=torch.complex64) * 1j).item() != 0


def test_a_damaged_weight_of_one_rank_is_named_and_kept_out_of_snapshots(tmp_path: Path) -> None:
    saves = ["snapshot.every=12steps"]
    first = composed(f"run_dir={tmp_path / 'first'}", *damaged(0, 14, 3, "bit"), *saves, "watch.weights_every=10")
    configs = [
        composed(f"run_dir={tmp_path / 'off'}", *damaged(1, 3, 1, 5.0), "watch.weights_every=0"),
        composed(f"run_dir={tmp_path / 'whole'}", *damaged(1, 1000, 1, 5.0), "watch.weights_every=1", ema(0.9)),
        composed(f"run_dir={tmp_path / 'save'}", *damaged(2, 7, 0, 5.0), *saves, "watch.weights_every=1000"),
    ]
    for (stopped,) in in_world(3, train_all, [first]):
        assert stopped.startswith(
            "the weights differ between ranks at step 20: rank 1 has other values in 4.bias than rank 0; rank 2 has "
            "other values in 4.bias than rank 0; type the command again to go on from the last snapshot"
        )
    for *went_on, save in in_world(3, train_all, configs):
        assert save.startswith("the weights differ between ranks at step 12: rank 2 has other values in 1.weight than")
        assert went_on == ["", ""]
    assert sorted(path.name for path in (tmp_path / "first" / "snapshots").iterdir()) == ["step_00000012"]
    assert not list((tmp_path / "save").glob("snapshots/*/state.pt"))


@pytest.mark.parametrize(
    ("strategy", "damage", "said"),
    [
        ("fsdp", damaged(3, 2, 0, "bit"), "rank 3 has other values in 1.weight than rank 1"),
        ("tensor_parallel", damaged(3, 2, 3, "bit"), "rank 3 has other values in block1.attention.queries"),
    ],
)
def test_copies_of_a_part_are_compared(tmp_path: Path, strategy: str, damage: list[str], said: str) -> None:
    words = [f"strategy={strategy}", "strategy.replicate=2", "watch.weights_every=2", *damage]
    if strategy == "tensor_parallel":
        text = [word for word in small_gpt(tmp_path, "trainer.precision=fp32") if word != "optimizer=adamw"]
        words = text + [word for word in words if word not in SMALL]
    for (sentence,) in in_world(4, train_all, [composed(f"run_dir={tmp_path / 'run'}", *words)]):
        assert sentence.startswith(f"the weights differ between ranks at step 2: {said}")


def test_two_ranks_stop_and_the_command_ends_with_one_sentence(start: Callable[..., Command]) -> None:
    run = start(*STARTERS["launch=fork"], "watch.weights_every=5", *damaged(1, 6, 1, 5.0)).finish(1)
    assert "rank 1 has other values in 1.bias than rank 0" in run.sentence
    assert "Traceback" not in run.output
