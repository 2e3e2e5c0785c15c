"""A training that diverges ends with a sentence, and leaves only finite weights."""

import math
import re
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
EVERY_STEP = ["logging.every=1", "snapshot.every=1steps"]


def _sentences(configs: list[Any]) -> list[str]:
    sentences = []
    for cfg in configs:
        try:
            train(cfg)
            sentences.append("")
        except TrainingDiverged as error:
            sentences.append(str(error))
    return sentences


def test_the_sentence_names_the_step_and_no_snapshot_has_weights_that_are_not_finite(tmp_path):
    huge = "optimizer.lr=1e30"  # the first update makes the weights huge, the second step's loss shows it
    rows = {"log": [huge, "logging.every=1"], "epoch": [huge, "logging.every=100"]}
    rows |= {"save": [huge, "logging.every=100", "snapshot.every=1steps"]}
    configs = [composed(f"run_dir={tmp_path / name}", *SMALL, *words) for name, words in rows.items()]
    good = [f"run_dir={tmp_path / 'good'}", *SMALL, *EVERY_STEP]
    configs += [composed(*good, "trainer.max_steps=2"), composed(*good, huge)]
    for *diverged, finished, resumed in in_world(2, _sentences, configs):
        assert finished == ""
        for sentence, step in [*((sentence, 2) for sentence in diverged), (resumed, 4)]:
            assert re.match(rf"the loss is (nan|inf) at step {step}\b.* or trainer.max_grad_norm=1.0$", sentence)
    for name in (*rows, "good"):
        snapshots = [contents(path)["model"] for path in list_snapshots(tmp_path / name / "snapshots")]
        weights = [weight for each in snapshots for weight in each.values() if weight.is_floating_point()]
        assert all(weight.isfinite().all() for weight in weights)
        assert name in ("save", "good") or not list((tmp_path / name).glob("snapshots/*"))
        assert not list((tmp_path / name).glob("snapshots/best_*"))
    assert weights


def test_rows_that_are_not_those_of_the_samples_name_none() -> None:
    broken, packed = torch.full((4, 2), math.nan), torch.full((3, 2), math.nan)
    assert broken_samples(torch.arange(4), broken, torch.zeros(4)) == [0, 1, 2, 3]
    assert broken_samples(torch.arange(4), packed, torch.tensor(math.nan)) == []
