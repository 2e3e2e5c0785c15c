"""A last batch, and last test samples, that do not suffice for all ranks: the numbers of one process."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lockstep.data import Tensors
from support.commands import own_data
from support.configs import composed, with_values
from support.digits import digits
from support.worlds import distance, in_world, train_all, weights

pytestmark = pytest.mark.whole

SAMPLES = 14  # on 3 ranks the last of two batches has 2 samples, and the last test batch 2


class Viewing(nn.Module):
    """`view(len(x), -1)`, as many models have it, cannot be computed for no samples."""

    def __init__(self, shape: list[int], classes: int, norm: bool = False) -> None:
        super().__init__()
        self.conv, self.norm2d = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.Identity()
        self.fc1, self.norm1d = nn.Linear(144, 12), nn.BatchNorm1d(12) if norm else nn.Identity()
        self.fc2 = nn.Linear(12, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm2d(self.conv(images)).relu()
        rows = features.view(len(features), -1)
        logits: Tensor = self.fc2(self.norm1d(self.fc1(rows)).relu())
        return logits


def few_digits(train: bool) -> Tensors:
    data = digits(train)
    return Tensors(data.inputs[:SAMPLES], data.targets[:SAMPLES])


def config(folder: Path, name: str, *overrides: str) -> Any:
    own = [*own_data(f"{__name__}.few_digits"), "model=linear", f"model._target_={__name__}.Viewing"]
    options = ["trainer.batch_size=12", "evaluation.batch_size=2", "trainer.epochs=2", "trainer.precision=fp64"]
    options += ["trainer.channels_last=false", "optimizer.fused=false", "logger=[]"]
    return composed(f"run_dir={folder / name}", *own, *options, *overrides)


def test_ranks_without_samples_change_no_number_whatever_the_model(tmp_path: Path) -> None:
    plain = config(tmp_path, "plain")
    norm = config(tmp_path, "norm", "+model.norm=true")
    in_world(1, train_all, [plain, norm])
    whole = ["strategy=fsdp", "strategy.wrap_min_parameters=10"]
    runs = {
        "plain": [
            with_values(plain, f"run_dir={tmp_path / 'ddp'}"),
            config(tmp_path, "virtual", "strategy=virtual_ranks", "strategy.count=6"),
            config(tmp_path, "micro", "trainer.gradient_accumulation_steps=4"),
        ],
        "norm": [
            with_values(norm, f"run_dir={tmp_path / 'synced'}"),
            config(tmp_path, "parts", *whole, "+model.norm=true"),
        ],
    }
    in_world(3, train_all, [*runs["plain"], *runs["norm"]])
    for name, same in runs.items():
        for cfg in same:
            found = distance(weights(tmp_path / name), weights(Path(cfg.run_dir)))
            assert found < 1e-12, cfg.run_dir
