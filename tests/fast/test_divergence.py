"""A training that diverges ends with a sentence, and leaves only finite weights."""

import math
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import TrainingDiverged
from lockstep.snapshots.files import list_snapshots
from lockstep.training.nonfinite import broken_samples
from support.configs import composed
from support.digits import FEW
from support.run_folders import contents
from support.worlds import in_world, train

SMALL = ["model=mlp", "logger=[]", "model.width=16", FEW, "scheduler=constant"]
HUGE = "optimizer.lr=1e30"


def _diverge(configs: list[Any]) -> list[str]:
    sentences = []
    for cfg in configs:
        try:
            train(cfg)
            sentences.append("")
        except TrainingDiverged as error:
            sentences.append(str(error))
    return sentences


def all_weights(folder: Path) -> list[torch.Tensor]:
    saved = [contents(path) for path in list_snapshots(folder / "snapshots")]
    return [weight for each in saved for weight in each["model"].values() if weight.is_floating_point()]


def test_the_sentence_names_the_step_and_no_snapshot_has_weights_that_are_not_finite(tmp_path):
    every = ["logging.every=1", "snapshot.every=1steps"]
    configs = [
        composed(f"run_dir={tmp_path / 'log'}", *SMALL, HUGE, "logging.every=1"),
        composed(f"run_dir={tmp_path / 'save'}", *SMALL, HUGE, "logging.every=100", "snapshot.every=1steps"),
        composed(f"run_dir={tmp_path / 'epoch'}", *SMALL, HUGE, "logging.every=100"),
        composed(f"run_dir={tmp_path / 'good'}", *SMALL, *every, "trainer.max_steps=2"),
        composed(f"run_dir={tmp_path / 'good'}", *SMALL, *every, HUGE),
    ]
    for sentences in in_world(2, _diverge, configs):
        log, save, epoch, good, resumed = sentences
        assert good == ""
        for sentence in (log, save, epoch):
            # The first update makes the weights huge, the second step's loss shows it.
            assert sentence.startswith(("the loss is nan at step 2", "the loss is inf at step 2"))
            assert sentence.endswith("or trainer.max_grad_norm=1.0")
        assert resumed.startswith(("the loss is nan at step 4", "the loss is inf at step 4"))
    for name in ("log", "save", "epoch", "good"):
        assert not list((tmp_path / name).glob("snapshots/best_*"))
        assert all(weight.isfinite().all() for weight in all_weights(tmp_path / name))
    assert all_weights(tmp_path / "good")
    for name in ("log", "epoch"):
        assert not list((tmp_path / name).glob("snapshots/*"))


def test_rows_that_are_not_those_of_the_samples_name_none() -> None:
    broken, packed = torch.full((4, 2), math.nan), torch.full((3, 2), math.nan)
    assert broken_samples(torch.arange(4), broken, torch.zeros(4)) == [0, 1, 2, 3]
    assert broken_samples(torch.arange(4), packed, torch.tensor(math.nan)) == []
