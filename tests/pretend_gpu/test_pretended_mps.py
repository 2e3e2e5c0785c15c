"""Trainings on Apple's pretended GPU: float64 stays on the CPU, nothing is pinned, and the weights are the CPU's."""

import json
from pathlib import Path
from typing import Any

import pytest

from pretend_gpu.scenarios import MIX, trained_on_gpus, worked
from support.commands import ema
from support.configs import composed
from support.digits import FEW
from support.worlds import distance, in_world, train, weights

BASE = ["trainer.max_steps=9", "trainer.epochs=9", "logger=[tensorboard]", "logging.every=2"]
RUNS = {
    "convnet": [ema(0.9)],
    "adamw, clipping, accumulation": [
        *("model=mlp", "optimizer=adamw", "trainer.max_grad_norm=1", "trainer.gradient_accumulation_steps=2")
    ],
    "dropout": ["model=mlp", "model.dropout=0.3"],
    "class weights": ["model=mlp", "task.class_weights=[1,2,3,4,5,6,7,8,9,10]"],
    "mixup": ["model=mlp", MIX],
    "regression": ["dataset=random", "dataset.samples=61", "model=mlp"],
    "bf16": ["trainer.precision=bf16"],
    "bf16-true": ["trainer.precision=bf16-true"],
}


def command(folder: Path, *words: str, backend: str = "auto") -> Any:
    data = [] if "dataset=random" in words else [FEW]
    return composed(f"run_dir={folder}", *BASE, *data, f"backend={backend}", *words)


@pytest.mark.parametrize("name", RUNS)
def test_a_training_has_the_weights_of_the_cpu(tmp_path: Path, name: str) -> None:
    (found,) = in_world(1, trained_on_gpus, command(tmp_path / "mps", *RUNS[name]), 1, "mps")
    assert found["error"] == ""
    assert found["weights_moved"] > 0
    assert json.loads((tmp_path / "mps" / "run.json").read_text())["starts"][-1]["state"] == "finished"
    words = [*RUNS[name], "trainer.channels_last=false"]  # as on that GPU
    in_world(1, train, command(tmp_path / "cpu", *words, backend="gloo"))
    assert distance(weights(tmp_path / "cpu"), weights(tmp_path / "mps")) < (1e-2 if "bf16" in name else 1e-5)


def test_its_snapshot_goes_on_and_is_evaluated_on_a_cpu(tmp_path: Path) -> None:
    mps, cpu = tmp_path / "mps", tmp_path / "cpu"
    (found,) = in_world(1, trained_on_gpus, command(mps, "model=mlp", "trainer.pause_after=1"), 1, "mps")
    assert found["error"] == ""
    in_world(1, worked, command(mps, "model=mlp", "mode=evaluate", f"resume={mps}"), 1, "mps")
    in_world(2, train, command(mps, "model=mlp", backend="gloo"))
    in_world(1, train, command(cpu, "model=mlp", backend="gloo"))
    assert distance(weights(cpu), weights(mps)) < 1e-5
