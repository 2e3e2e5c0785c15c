"""mode=evaluate: the metrics of a trained run, on any data and any number of ranks."""

import itertools
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import TrainingDiverged
from lockstep.modes.base import Mode, TrainedRun, require_place, write_output

if TYPE_CHECKING:
    from lockstep.strategies.base import JobSpec

log = logging.getLogger(__name__)


class Evaluate(Mode):
    """Evaluates as training does: with averaged weights if there are any, each sample counted once.

    split: the data to evaluate; training data is not augmented.
    file: where the numbers go; null: evaluation.json in the run folder, or evaluation_2.json beside one of other data.
    Beside it evaluation_samples.csv has the results of each sample.
    """

    name = "evaluate"

    def __init__(self, snapshot: str, split: Literal["test", "val", "train"], file: str | None) -> None:
        self.snapshot, self.split, self.file = snapshot, split, file
        self.reads_training_data = split != "test"

    def validate(self, job: "JobSpec") -> None:
        require_place(self.file)

    def run(self, trained: TrainedRun) -> dict[str, float]:
        """Returns {metric: mean over all samples}, the same on every rank.

        Raises TrainingDiverged if the loss is NaN or infinite.
        """
        from lockstep.build import torchmetrics_of
        from lockstep.snapshots.find import compared
        from lockstep.training.evaluate import Metrics, SampleResults, evaluate, write_samples

        loader, found = trained.loader(self.split), torchmetrics_of(trained.run)
        results = SampleResults(trained.run.task, None if loader.is_stream else len(loader.reader))
        wanted = Metrics(found, len(loader.reader)) if found else None
        metrics = evaluate(trained.run, loader, results=results, metrics=wanted)
        if not math.isfinite(metrics["loss"]):
            raise self._diverged(trained, metrics["loss"])
        results.reduce(trained.world)
        facts: dict[str, Any] = {
            "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
            "split": self.split,
            "samples": results.samples,
            "snapshot": str(trained.snapshot),
            "step": trained.step,
            "ranks": trained.world.size,
            "config": compared(trained.config),
        }
        path = Path(self.file) if self.file is not None else _own_file(trained.folder, facts)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log.info("evaluated: %s %s, over %d samples at step %d", self.split, shown, results.samples, trained.step)
        write_output(trained.world, path, json.dumps(facts, indent=1) + "\n")
        if trained.world.is_rank_zero and not loader.is_stream:
            write_samples(path.with_name(f"{path.stem}_samples.csv"), results, loader)
        return metrics

    def _diverged(self, trained: TrainedRun, loss: float) -> TrainingDiverged:
        """The error, with the samples that hold a NaN. A collective."""
        from lockstep.training.nonfinite import OTHER_DATA, broken_in, sentence_about

        what = f"the {self.split} loss of {trained.snapshot} is {loss}"
        broken = broken_in(trained.loader(self.split), trained.run)
        if not broken:
            return TrainingDiverged(f"{what}; type mode.snapshot=<another one>")
        data = {"train": "training", "val": "validation"}.get(self.split, self.split)
        return TrainingDiverged(f"{what}; in the {data} data {sentence_about(broken)}; {OTHER_DATA}")


def _own_file(folder: Path, facts: Mapping[str, Any]) -> Path:
    """evaluation.json, evaluation_2.json, ...: the first that does not exist, or is of this evaluation."""
    for number in itertools.count(1):
        path = folder / ("evaluation.json" if number == 1 else f"evaluation_{number}.json")
        before = json.loads(path.read_text()) if path.exists() else facts
        if all(before.get(name) == facts[name] for name in facts.keys() - {"metrics", "ranks"}):
            return path
    raise AssertionError
