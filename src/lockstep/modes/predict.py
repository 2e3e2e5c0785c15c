"""mode=predict: what a trained net says of each sample, as a CSV file."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.modes.base import TrainedRun
from lockstep.modes.evaluate import OfSplit

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import Tensor

log = logging.getLogger(__name__)

OF_CLASSES = ("prediction", "truth")  # columns whose whole numbers may be classes
NO_TARGET = -100  # of images without labels
Columns = dict[str, "Tensor"]
"""{name: (N,) or (N, values)} on the CPU, one row for each sample."""


class Predict(OfSplit):
    """One row for each sample, in the data set's order, whatever the number of ranks.

    The columns are index, for images file, what `Task.predictions` gives, and truth, empty for an image without label.

    file: null: predictions.csv in the run folder.
    """

    name, needs_labels = "predict", False

    def run(self, trained: TrainedRun) -> None:
        """Raises ConfigError, on all ranks, if the file cannot be written."""
        from lockstep.data.loader import files_of
        from lockstep.training.evaluate import gathered

        path, loader = trained.output(self.file, "predictions.csv"), trained.loader(self.split)
        columns, text = gathered(trained.world, predict(trained, self.split)), ""
        if columns:
            numbers = columns.pop("number")
            found = table({name.removeprefix("of "): values for name, values in columns.items()}, trained.classes)
            found.index = loader.whole(numbers.numpy())
            if files := files_of(loader):
                found.insert(0, "file", [files[number] for number in numbers.tolist()])
            text = found.to_csv(index_label="index", lineterminator="\n", na_rep="nan")
            log.info("predicted: %d samples of %s at step %d", len(found), self.split, trained.step)
        trained.write(path, text)


def predict(trained: TrainedRun, split: str) -> list[Columns]:
    """The columns "of ..." and "number" of this rank's batches; empty where another rank computes the outputs."""
    import torch

    from lockstep.data.source import count_samples
    from lockstep.distributed import signals
    from lockstep.failures.record import heartbeat
    from lockstep.training.evaluate import evaluating, stop

    run, loader, parts, numbers = trained.run, trained.loader(split), list[Columns](), torch.empty(0)

    def keep(outputs: "Tensor", targets: "Tensor") -> None:
        nonlocal numbers
        now, numbers = numbers.tensor_split([count_samples(targets)])  # a pipeline has some of them
        columns = dict(_columns(run.task.predictions(outputs) | {"truth": targets})) if run.strategy.counts else {}
        of_samples = {name: values for name, values in columns.items() if values.shape[:1] == now.shape}
        if of_samples:
            parts.append({"number": now} | {f"of {name}": each.detach().cpu() for name, each in of_samples.items()})

    with evaluating(run, loader):
        for part in loader.evaluation(run.config.evaluation.batch_size):
            numbers = part.numbers
            run.strategy.evaluate(part, keep)
            heartbeat.beat()
            if signals.stop_requested():
                stop()
    # Of what all batches have: a loss that the model adds has no row for each sample.
    names = set[str]().union(*parts[:1]).intersection(*parts)
    return [{name: part[name] for name in part if name in names} for part in parts]


def _columns(values: Any, name: str = "") -> "Iterator[tuple[str, Tensor]]":
    """(name, tensor) of each in dicts and tuples, whose names are <key>, <key>_<key>, <key>_<number> and so on."""
    if not isinstance(values, Mapping | tuple | list):
        yield name, values
        return
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        yield from _columns(value, f"{name}_{key}" if name else str(key))


def table(columns: Columns, classes: Sequence[str]) -> "DataFrame":
    """A column for each value of a sample. classes: names that stand for the numbers of classes; empty: there are none.

    Floats have as many digits as it takes to read the same number again.
    """
    import pandas as pd
    import torch

    found: dict[str, Any] = {}
    for name, values in columns.items():
        rows = (values.float() if values.dtype == torch.bfloat16 else values).reshape(len(values), -1).numpy()
        labels = classes if name == "probability" and len(classes) == rows.shape[1] else range(rows.shape[1])
        found |= {name if rows.shape[1] == 1 else f"{name}_{label}": rows[:, i] for i, label in enumerate(labels)}
        if name in OF_CLASSES and values.dim() == 1 and rows.dtype.kind in "iu":
            said = dict(enumerate(classes)) | {NO_TARGET: ""}
            found[name] = [said.get(number, number) for number in values.tolist()]
    return pd.DataFrame(found)
