"""Folders with a run.json as a training writes it, made without a training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS = {"optimizer.lr": 0.1, "trainer.epochs": 5, "seed": 0, "dataset.mean": [0.5], "trainer.compile": False}


def make_run(
    folder: Path,
    best: float | None = 0.5,
    state: str = "finished",
    metric: tuple[str, str] = ("val/accuracy", "max"),
    test: dict[str, Any] | None = None,
    tags: Sequence[str] = (),
    started: float = 1795354012.7,
    **changes: Any,
) -> Path:
    """A run whose overrides are the keys of `changes`, with __ for a dot: optimizer__lr=0.2."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    start = {"world_size": 2, "launcher": "fork", "hosts": ["another"], "started": started, "ended": started + 86}
    start |= {"from_step": 0, "to_step": 46, "state": state, "exit_code": 0, "source": "baed", "pid": 1}
    contents = {
        "format": 2,
        "command": "python src/train.py",
        "flags": [],
        "cwd": str(folder.parent),
        "overrides": ["launch=fork", *(f"{key}={value}" for key, value in changed.items())],
        "sweep": None,
        "tags": list(tags),
        "notes": None,
        "options": {"model": "mlp"},
        "config": SETTINGS | changed,
        "data": {"training_samples": 1437, "training_data": "cda99ef9", "test_samples": 360, "test_data": "90ab"},
        "code": {"source": "baed35b7596fd0b6", "modules": {}, "commit": "59029b0b3e9e8f7448ae38e6eccc3a42518d3d6b"},
        "environment": {"python": "3.11.7", "torch": "2.14.1", "device": "cpu"},
        "objective": {"name": metric[0], "mode": metric[1], "best": best, "step": 46, "last": None},
        "history": [],
        "test": test,
        "starts": [start],
        "steps": 46,
        "samples_per_second": 5709.4,
    }
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(contents, indent=1))
    return folder
