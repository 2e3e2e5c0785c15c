"""`trainer.digest`: what stands in digests.bin, and that it tells the first step at which two runs part."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.training.step_records import StepDigests, StepTable, in_memory_order, read_digests
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


def table_of(folder: Path) -> StepTable:
    table = read_digests(folder)
    assert table is not None
    return table


def first_difference(one: Path, other: Path, with_loss: bool = True) -> tuple[int, list[str]] | None:
    """The first step at which two runs have other digests, and the names of these. None if all are the same."""
    first, second = table_of(one), table_of(other)
    assert first.names == second.names
    for step in [step for step in first.rows if step in second.rows]:
        pairs = zip(first.names, first.rows[step], second.rows[step], strict=True)
        if names := [name for name, a, b in pairs if a != b and (with_loss or name != "loss")]:
            return step, names
    return None


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
    differs = {name: first_difference(folders["whole"], folders[name]) for name in options if name != "off"}
    assert differs["whole"] is None
    assert differs["seventh"] == (7, ["4.weight"])
    assert differs["coarse"] is not None
    assert differs["coarse"][0] == 20  # the damage is in step 13, and step 10 is the last one before with digests
    assert list(table_of(folders["coarse"]).rows) == [10, 20, 30]
    # Gradients are those before clipping, of the whole batch.
    assert differs["clipped"] is not None
    assert differs["clipped"][0] == 1
    assert differs["clipped"][1][:2] == ["1.weight", "1.bias"]
    assert differs["accumulated"] is not None
    assert (differs["accumulated"][0], differs["accumulated"][1][0]) == (1, "loss")
    assert read_digests(folders["off"]) is None

    table = table_of(folders["seventh"])
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
    assert first_difference(*folders.values()) == (1, ["mean"])


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
    assert list(table_of(one).rows) == list(range(3, 31, 3))


def test_gradients_are_averaged_before_they_are_digested(tmp_path: Path) -> None:
    """virtual_ranks has the same bits on one rank and on two; a digest of one rank's own gradient would differ."""
    virtual = [*SMALL, "strategy=virtual_ranks", "trainer.max_steps=4"]
    for ranks in (1, 2):
        in_world(ranks, train, composed(f"run_dir={tmp_path / str(ranks)}", *virtual))
    # The loss is that of rank 0's samples.
    assert first_difference(tmp_path / "1", tmp_path / "2", with_loss=False) is None
    assert list(table_of(tmp_path / "1").rows) == list(table_of(tmp_path / "2").rows) == [1, 2, 3, 4]


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
    assert list(table_of(tmp_path).rows) == [1, 2]
