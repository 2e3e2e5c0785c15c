"""mode=evaluate: the metrics of a trained run, on any data and any number of ranks."""

import json
import logging
import math
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import TrainingDiverged
from lockstep.modes.base import Mode, TrainedRun

log = logging.getLogger(__name__)


class OfSplit(Mode):
    """A mode that goes through the data of a split, of which training data is not augmented. file: what it writes."""

    def __init__(self, snapshot: str, split: Literal["test", "val", "train"], file: str | None) -> None:
        self.snapshot, self.split, self.file = snapshot, split, file
        self.reads_training_data = split != "test"


class Evaluate(OfSplit):
    """Evaluates as training does: with averaged weights if there are any, each sample counted once.

    file: null: evaluation.json in the run folder, or evaluation_2.json beside one of other data. Beside it
    evaluation_samples.csv has the results of each sample.
    """

    name = "evaluate"

    def run(self, trained: TrainedRun) -> dict[str, float]:
        """Returns {metric: mean over all samples}, the same on every rank.

        Raises TrainingDiverged if the loss is NaN or infinite.
        """
        from lockstep.build import torchmetrics_of
        from lockstep.loggers.base import Loggers
        from lockstep.snapshots.checkpointer import compared
        from lockstep.training.evaluate import Evaluator, stop

        facts: dict[str, Any] = {
            "split": self.split,
            "snapshot": str(trained.snapshot),
            "step": trained.step,
            "config": compared(trained.config),
        }
        path = trained.output(self.file, _own_name(trained.folder, facts))
        file, metrics_of = path.with_name(f"{path.stem}_samples.csv"), torchmetrics_of(trained.run)
        evaluator = Evaluator(trained.run, trained.loader(self.split), Loggers([]), 0, self.split, metrics_of, file)
        try:
            metrics = evaluator(stop, trained.step)
        except TrainingDiverged as error:  # what to type there is of a training
            raise TrainingDiverged(f"{error.what}; repair the data, or type mode.snapshot=<another one>") from None
        facts["metrics"] = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        facts |= {"samples": evaluator.facts["samples"], "ranks": trained.world.size}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log.info("evaluated: %s %s, over %d samples at step %d", self.split, shown, facts["samples"], trained.step)
        trained.write(path, json.dumps(facts, indent=1) + "\n")
        return metrics


def _own_name(folder: Path, facts: Mapping[str, Any]) -> str:
    """evaluation.json, evaluation_2.json, ...: the first that does not exist, or is of this evaluation."""
    paths = (folder / (f"evaluation_{number}.json" if number > 1 else "evaluation.json") for number in count(1))
    mine = (path for path in paths if not path.exists() or facts.items() <= json.loads(path.read_text()).items())
    return next(mine).name
