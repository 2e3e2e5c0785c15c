"""mode=evaluate: the metrics of a trained run. mode=predict: what it says of each sample. On any number of ranks."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.build import torchmetrics_of
from lockstep.data.loader import files_of
from lockstep.loggers.base import Loggers
from lockstep.modes.base import Mode, TrainedRun
from lockstep.snapshots.checkpointer import compared
from lockstep.training.evaluate import Evaluator, gathered, pass_each, stop

log = logging.getLogger(__name__)

OF_CLASSES = ("prediction", "truth")  # columns whose whole numbers may be classes
NO_TARGET = -100  # of images without labels


class OfSplit(Mode):
    """A mode that goes through the data of a split, of which training data is not augmented. file: what it writes."""

    def __init__(self, snapshot: str, split: Literal["test", "val", "train"], file: str | None) -> None:
        self.snapshot, self.split, self.file = snapshot, split, file
        self.reads_training_data = split != "test"


class Evaluate(OfSplit):
    """Evaluates as training does: with averaged weights if there are any, each sample counted once.
    file: null: evaluation.json in the run folder, or evaluation_2.json beside one of other data. Beside it
    evaluation_samples.csv has the results of each sample."""

    name = "evaluate"

    def run(self, trained: TrainedRun) -> dict[str, float]:
        """Returns {metric: mean over all samples}, the same on every rank. Raises TrainingDiverged if the loss is NaN
        or infinite."""
        facts: dict[str, Any] = {"split": self.split, "snapshot": str(trained.snapshot), "step": trained.step}
        facts["config"] = compared(trained.config)
        names = (f"evaluation_{number}.json" if number > 1 else "evaluation.json" for number in count(1))
        paths = (trained.folder / name for name in names)  # the first that is not there, or is of this evaluation
        own = next(one for one in paths if not one.exists() or facts.items() <= json.loads(one.read_text()).items())
        path = trained.output(self.file, own.name)
        file, metrics_of = path.with_name(f"{path.stem}_samples.csv"), torchmetrics_of(trained.run)
        evaluator = Evaluator(trained.run, trained.loader(self.split), Loggers([]), 0, self.split, metrics_of, file)
        metrics = evaluator(stop, trained.step)
        facts["metrics"] = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        facts |= {"samples": evaluator.facts["samples"], "ranks": trained.world.size}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log.info("evaluated: %s %s, over %d samples at step %d", self.split, shown, facts["samples"], trained.step)
        trained.write(path, json.dumps(facts, indent=1) + "\n")
        return metrics


class Predict(OfSplit):
    """One row for each sample, in the data set's order, whatever the number of ranks.
    The columns are index, for images file, what `Task.predictions` gives, and truth, empty for an image without label.
    file: null: predictions.csv in the run folder."""

    name, needs_labels = "predict", False

    def run(self, trained: TrainedRun) -> None:
        """Raises ConfigError, on all ranks, if the file cannot be written."""
        path, loader, text = trained.output(self.file, "predictions.csv"), trained.loader(self.split), ""
        run, parts = trained.run, list[dict[str, Tensor]]()

        def keep(outputs: Any, targets: Any, numbers: Tensor) -> None:
            columns = dict(_columns(run.task.predictions(outputs) | {"truth": targets}))
            own = {name: each.detach().cpu() for name, each in columns.items() if each.shape[:1] == numbers.shape}
            parts.append({"number": numbers} | {f"of {name}": each for name, each in own.items()})

        pass_each(run, loader, keep)
        columns = gathered(trained.world, parts)
        if columns:
            samples = columns.pop("number").numpy()
            found = table({name.removeprefix("of "): values for name, values in columns.items()}, trained.classes)
            found.index = loader.reader.whole(samples)
            if files := files_of(loader):
                found.insert(0, "file", [files[number] for number in samples.tolist()])
            text = found.to_csv(index_label="index", lineterminator="\n", na_rep="nan")
            log.info("predicted: %d samples of %s at step %d", len(found), self.split, trained.step)
        trained.write(path, text)


def _columns(values: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each in dicts and tuples, whose names are <key>, <key>_<key>, <key>_<number> and so on."""
    if not isinstance(values, Mapping | tuple | list):
        yield name, values
        return
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        yield from _columns(value, f"{name}_{key}" if name else str(key))


def table(columns: Mapping[str, Tensor], classes: Sequence[str]) -> Any:
    """A pandas.DataFrame with a column for each value of a sample, of {name: (N,) or (N, values)} on the CPU. classes:
    names that stand for numbers of classes. Floats have as many digits as it takes to read the same number again."""
    import pandas as pd

    found: dict[str, Any] = {}
    for name, values in columns.items():
        rows = (values.float() if values.dtype == torch.bfloat16 else values).reshape(len(values), -1).numpy()
        labels = classes if name == "probability" and len(classes) == rows.shape[1] else range(rows.shape[1])
        found |= {name if rows.shape[1] == 1 else f"{name}_{label}": rows[:, i] for i, label in enumerate(labels)}
        if name in OF_CLASSES and values.dim() == 1 and rows.dtype.kind in "iu":
            said = dict(enumerate(classes)) | {NO_TARGET: ""}
            found[name] = [said.get(number, number) for number in values.tolist()]
    return pd.DataFrame(found)
