"""What a run tells its loggers, and what one of them has written."""

import csv
from types import SimpleNamespace

from lockstep.loggers.base import EpochSummary, RunInfo


class Training(list):
    """The samples of a training, as a `Loader` tells them."""

    def __init__(self, samples, batch_size):
        super().__init__(range(samples))
        self.batch_size = batch_size


def run_info(folder, step=0, world_size=1, batch_size=64, **changes):
    """changes: other facts."""
    run = SimpleNamespace(
        config=SimpleNamespace(
            run_dir=str(folder),
            trainer=SimpleNamespace(epochs=2, final=None, max_grad_norm=None),
            evaluation=SimpleNamespace(metrics={}),
        ),
        world=SimpleNamespace(size=world_size),
        task=SimpleNamespace(better={"loss": "min", "accuracy": "max"}),
        loaders=SimpleNamespace(
            train=Training(1293, batch_size),
            val=SimpleNamespace(reader=range(144)),
            test=SimpleNamespace(reader=range(360)),
        ),
        finished=False,
        objective="val/accuracy",
        direction="max",
        progress=SimpleNamespace(step=step, epoch=0, samples=0, best=None, best_step=None),
    )
    facts = {"overrides": [], "tags": [], "notes": None, "data": {}, "environment": {}, "sweep": None, "flags": []}
    facts |= {"options": {}, "config": {"seed": 0}, "start": {"world_size": world_size}, "test": None}
    return RunInfo(run, facts | {"command": "python src/train.py"} | changes)


def epoch(number):
    metrics = {"train": {"loss": 1 / number, "accuracy": 0.5}, "val": {"loss": 2 / number, "accuracy": 0.25}}
    return EpochSummary(number, 2, 2 * number, metrics, {"samples": 1234.5})


def read_rows(folder):
    """[(step, tag, value)] of the metrics.csv of a run folder."""
    with (folder / "metrics.csv").open() as file:
        return [(int(row["step"]), row["tag"], float(row["value"])) for row in csv.DictReader(file)]
