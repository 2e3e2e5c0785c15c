"""`trainer.digest`, and the first step at which two runs part."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.runs import compare
from lockstep.runs.compare import read_digests
from lockstep.runs.record import read_run
from lockstep.training.step_records import StepDigests, in_memory_order
from lockstep.training.weight_check import digest
from support.configs import composed
from support.worlds import in_world, train, train_all

SMALL = ["model=mlp", "model.width=16", "dataset.train.train=false", "trainer.batch_size=16", "scheduler=constant"]
SMALL += ["logger=[]", "trainer.max_steps=30", "trainer.digest=1"]
DAMAGED = ["optimizer._target_=support.damage.DamagedSGD", "++optimizer.fused=null", "+optimizer.rank=0"]


class Replacing(nn.Module):
    """Puts another tensor in the place of its buffer in each step, which no loss shows."""

    mean: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(64, 10), scale
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + self.scale * flat.detach().mean(0)
        out: Tensor = self.head(flat)
        return out


def damaged(at_step: int, parameter: int) -> list[str]:
    """One value of one parameter is one bit, its lowest, away from what SGD gives."""
    return [*DAMAGED, f"+optimizer.at_step={at_step}", f"+optimizer.parameter={parameter}", "+optimizer.change=bit"]


def why(one: Path, other: Path) -> tuple[list[str], str]:
    """(the other lines, what is said of the steps) of `runs.py why`."""
    *lines, steps = compare.why(read_run(one), read_run(other))
    return lines, steps.removeprefix("steps:").strip()


def test_a_change_of_one_bit_is_found_at_its_step_under_its_name(tmp_path: Path) -> None:
    options = {
        "whole": damaged(1000, 0),
        "seventh": damaged(7, 2),
        "coarse": [*damaged(13, 3), "trainer.digest=on"],
        "clipped": [*damaged(1000, 0), "trainer.max_grad_norm=1e-6"],
        "accumulated": [*damaged(1000, 0), "trainer.gradient_accumulation_steps=2"],
        "off": [*damaged(1000, 0), "trainer.digest=off"],
    }
    folders = {name: tmp_path / name for name in options}
    in_world(1, train_all, [composed(f"run_dir={folders[name]}", *SMALL, *options[name]) for name in options])
    lines, steps = why(folders["whole"], folders["seventh"])
    assert [line.split() for line in lines if line.startswith("config")] == [
        ["config", "optimizer.at_step", "1000", "7"],
        ["config", "optimizer.parameter", "0", "2"],
    ]
    assert "the same: code, environment, data, ranks" in lines
    assert "weights: the two model.pt hold other bits" in lines
    after = "the loss and all gradients are the same, and after the update"
    assert steps == f"the runs part at step 7: {after} 4.weight differs (1 of 6 weights and buffers)"
    coarse = why(folders["whole"], folders["coarse"])[1]
    assert coarse.startswith("the runs part at step 20: the loss ")  # in float32 one bit need not change the loss
    assert "the digests of step 10 are the same, and the steps between have none: type trainer.digest=1" in coarse
    # Gradients are those before clipping, of the whole batch.
    assert why(folders["whole"], folders["clipped"])[1].startswith(f"the runs part at step 1: {after} 1.weight, 1.bias")
    assert "at step 1: the loss differs" in why(folders["whole"], folders["accumulated"])[1]
    assert "off has no digests; type trainer.digest=on" in why(folders["whole"], folders["off"])[1]
    assert not (folders["off"] / "digests.bin").exists()

    table = read_digests(folders["seventh"])
    assert table is not None
    assert list(table.rows) == list(range(1, 31))
    saved = torch.load(folders["seventh"] / "model.pt", weights_only=True)
    last = dict(zip(table.names, table.rows[30], strict=True))
    assert {name: last[name] for name in saved} == {
        name: digest(in_memory_order(weight)).item() for name, weight in saved.items()
    }


def _stopped_and_resumed(configs: list[Any], folder: Path) -> None:
    """After the first training its last snapshot is lost, and a row of the file is cut off."""
    train(configs[0])
    (folder / "snapshots" / "step_00000018.pt").unlink()
    with open(folder / "digests.bin", "ab") as file:
        file.write(b"cut")
    for cfg in configs[1:]:
        train(cfg)


def test_a_buffer_that_is_replaced_is_digested(tmp_path: Path) -> None:
    words = ["model=linear", f"model._target_={__name__}.Replacing", "~model.shape", "~model.classes"]
    words += ["logger=[]", "trainer.max_steps=3", "trainer.digest=1"]
    folders = {scale: tmp_path / str(scale) for scale in (0.1, 0.2)}
    in_world(
        1, train_all, [composed(f"run_dir={folders[scale]}", *words, f"+model.scale={scale}") for scale in folders]
    )
    steps = why(*folders.values())[1]
    assert steps.endswith(
        "at step 1: the loss and all gradients are the same, and after the update mean differs (1 of 3 "
        "weights and buffers)"
    )


def test_a_resumed_run_has_the_digests_of_an_unbroken_one(tmp_path: Path) -> None:
    one, other = tmp_path / "resumed", tmp_path / "unbroken"
    every = ["snapshot.every=8steps", "trainer.digest=3"]
    configs = [
        composed(f"run_dir={one}", *SMALL, *every, "trainer.max_steps=18"),
        composed(f"run_dir={one}", *SMALL, *every),
        composed(f"run_dir={other}", *SMALL, *every),
    ]
    in_world(1, _stopped_and_resumed, configs, one)
    assert (one / "digests.bin").read_bytes() == (other / "digests.bin").read_bytes()
    assert why(one, other)[1] == "all digests are the same, of 10 steps from 3 to 30"


def test_gradients_are_averaged_before_they_are_digested(tmp_path: Path) -> None:
    """virtual_ranks has the same bits on one rank and on two; a digest of one rank's own gradient would differ."""
    virtual = [*SMALL, "strategy=virtual_ranks", "trainer.max_steps=4"]
    for ranks in (1, 2):
        in_world(ranks, train, composed(f"run_dir={tmp_path / str(ranks)}", *virtual))
    lines, steps = why(tmp_path / "1", tmp_path / "2")
    assert steps == "all digests are the same, of 4 steps from 1 to 4"
    assert ["ranks", "number", "in", "each", "life", "[1]", "[2]"] in [line.split() for line in lines]


def test_after_a_rollback_each_step_has_one_row(tmp_path: Path) -> None:
    halves = [f"dataset.{half}._target_=support.damage.FloatDigits" for half in ("train", "test")]
    data = [*halves, "+dataset.train.broken=[100]", "+dataset.test.broken=[]", "dataset.mean=null", "dataset.std=null"]
    options = ["watch.nan=rollback", "snapshot.every=4steps", "trainer.batch_size=64", "dataset.train.train=true"]
    in_world(1, train, composed(f"run_dir={tmp_path}", *SMALL, *data, *options))
    table = read_digests(tmp_path)
    assert table is not None
    assert list(table.rows) == list(range(1, 31))
    assert "back to step" in (tmp_path / "train.log").read_text()
    width = 8 * (len(table.names) + 1)
    content = (tmp_path / "digests.bin").read_bytes()
    assert len(content) - content.index(b"\n") - 1 == 30 * width


def test_a_sparse_gradient_has_the_digest_of_its_values() -> None:
    assert digest(torch.eye(3).to_sparse()) == digest(torch.eye(3))


def test_a_full_disk_leaves_no_part_of_a_row(tmp_path: Path) -> None:
    strategy = SimpleNamespace(model=torch.nn.Linear(2, 1), world=SimpleNamespace(device=torch.device("cpu")))
    digests = StepDigests(SimpleNamespace(strategy=strategy), every=1)
    digests.path, row = tmp_path / "digests.bin", torch.arange(len(digests.names))
    digests.path.write_bytes(digests.header)
    digests.rows = [(1, row)]
    digests.flush()
    size = digests.path.stat().st_size
    digests.rows = [(2, row)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
    try:
        with pytest.raises(OSError):
            digests.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert digests.path.stat().st_size == size
    digests.flush()
    found = read_digests(tmp_path)
    assert found is not None
    assert list(found.rows) == [1, 2]
