"""Folders with a run.json as a training writes it, made without a training."""

import json

SETTINGS = {"optimizer.lr": 0.1, "trainer.epochs": 5, "seed": 0, "dataset.mean": [0.5], "trainer.compile": False}
CODE = {"source": "baed35b7596fd0b6", "modules": {}, "commit": "59029b0b3e9e8f7448ae38e6eccc3a42518d3d6b"}
DATA = {"training_samples": 1437, "training_data": "cda99ef9", "test_samples": 360, "test_data": "90ab"}
SAME = {"format": 2, "command": "python src/train.py", "flags": [], "sweep": None, "notes": None, "history": []}
SAME |= {"options": {"model": "mlp"}, "data": DATA, "code": CODE, "steps": 46, "samples_per_second": 5709.4}
SAME |= {"environment": {"python": "3.11.7", "torch": "2.14.1", "device": "cpu"}}


def make_run(
    folder,
    best=0.5,
    state="finished",
    metric=("val/accuracy", "max"),
    test=None,
    tags=(),
    started=1795354012.7,
    **changes,
):
    """A run whose overrides are the keys of `changes`, with __ for a dot: optimizer__lr=0.2."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    start = {"world_size": 2, "launcher": "fork", "hosts": ["another"], "started": started, "ended": started + 86}
    start |= {"from_step": 0, "to_step": 46, "state": state, "exit_code": 0, "source": "baed", "pid": 1}
    objective = {"name": metric[0], "mode": metric[1], "best": best, "step": 46, "last": None}
    own = {"cwd": str(folder.parent), "tags": [*tags], "config": SETTINGS | changed, "test": test, "starts": [start]}
    overrides = ["launch=fork", *(f"{key}={value}" for key, value in changed.items())]
    folder.mkdir(parents=True)
    contents = SAME | own | {"objective": objective, "overrides": overrides}
    (folder / "run.json").write_text(json.dumps(contents, indent=1))
    return folder
