"""mode=predict: what a trained net says of each sample, as a CSV file."""

import csv
import io
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import EXIT_STOPPED_WITHOUT_SNAPSHOT, ConfigError, StoppedEarly
from lockstep.modes.base import Mode, TrainedRun, require_place, write_output

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.strategies.base import JobSpec

log = logging.getLogger(__name__)

OF_CLASSES = ("prediction", "truth")  # columns whose whole numbers may be classes

NUMBERS = ""  # the column of the samples' numbers in what is gathered
Columns = dict[str, "Tensor"]
"""{name: (N,) or (N, values)} on the CPU, one row for each sample."""


class Predict(Mode):
    """One row for each sample, in the data set's order, whatever the number of ranks.

    The columns are index, for images file, what `Task.predictions` gives, and truth, empty for an image without label.

    split: the data to predict; training data is not augmented.
    file: where the rows go; null: predictions.csv in the run folder.
    """

    name, needs_labels = "predict", False

    def __init__(self, snapshot: str, split: Literal["test", "val", "train"], file: str | None) -> None:
        self.snapshot, self.split, self.file = snapshot, split, file
        self.reads_training_data = split != "test"

    def validate(self, job: "JobSpec") -> None:
        require_place(self.file)

    def run(self, trained: TrainedRun) -> None:
        """Raises ConfigError, on all ranks, if the file cannot be written."""
        from lockstep.data.loader import files_of
        from lockstep.distributed.old_world import gather_state

        loader, world = trained.loader(self.split), trained.world
        columns = predict(trained, self.split)
        rows = sum(world.all_gather_json(len(columns.get(NUMBERS, ()))))
        samples = len(loader.reader)
        if rows != samples:
            raise ConfigError(f"{samples - rows} samples of {samples} have no prediction; type mode.split=test")
        shares = gather_state(world, columns)
        path = Path(self.file) if self.file is not None else trained.folder / "predictions.csv"
        lines = (
            table(in_order(shares, samples), trained.classes, files_of(loader), loader.indices)
            if world.is_rank_zero
            else iter(())
        )
        log.info("predicted: %d samples of %s at step %d", samples, self.split, trained.step)
        write_output(world, path, lines)


def predict(trained: TrainedRun, split: str) -> Columns:
    """The columns of this rank's share, and the numbers of its rows; empty where another rank computes the outputs."""
    import torch

    from lockstep.data.source import count_samples
    from lockstep.distributed import signals
    from lockstep.failures import reporter
    from lockstep.training.evaluate import evaluating

    run, parts, numbers = trained.run, list[Columns](), torch.empty(0)

    def keep(outputs: "Tensor", targets: "Tensor") -> None:
        nonlocal numbers
        named = run.task.predictions(outputs) | {"truth": targets}
        columns = [column for name, values in named.items() for column in _columns(name, values)]
        count = min(len(numbers), count_samples(targets))  # a pipeline has some of them; targets may be packed
        of_samples = [(name, values.detach()) for name, values in columns if values.shape[:1] == (count,)]
        now, numbers = numbers.tensor_split([count])
        parts.append({NUMBERS: now} | {name: _beside(targets, values).cpu() for name, values in of_samples})

    loader = trained.loader(split)
    with evaluating(run, loader):
        for part in loader.evaluation(run.config.evaluation.batch_size):
            numbers = part.numbers
            run.strategy.evaluate(part, keep)
            reporter.heartbeat()
            if signals.stop_requested():
                raise StoppedEarly("stopped early; no file was written", EXIT_STOPPED_WITHOUT_SNAPSHOT)
    forms = [{name: list(values.shape[1:]) for name, values in part.items()} for part in parts]
    names = _of_one_shape(trained.world.all_gather_json(list({str(form): form for form in forms}.values())))
    return {name: torch.cat([part[name] for part in parts]) for name in names} if parts else {}


def _of_one_shape(ranks: Sequence[Sequence[Mapping[str, list[int]]]]) -> list[str]:
    """The columns that all batches have. Others, such as a loss that the model adds, have no row for each sample.

    ranks: the shapes of a row in each batch of each rank. Raises ConfigError, on all ranks, where they differ.
    """
    batches = [batch for rank in ranks for batch in rank]
    names = [name for name in (batches[0] if batches else ()) if all(name in batch for batch in batches)]
    for name in names:
        shapes = sorted({tuple(batch[name]) for batch in batches})
        if len(shapes) > 1:
            raise ConfigError(
                f"{name} has rows of the shapes {list(shapes[0])} and {list(shapes[-1])}, and a column needs one; "
                f"type evaluation.batch_size=<more than the samples> launch=env, or give all samples one length in "
                f"loader.collate_fn"
            )
    return names


def _columns(name: str, values: Any) -> "Iterator[tuple[str, Tensor]]":
    """The columns of outputs or targets: `name`, or in dicts and tuples `name`_<key> or `name`_<number> of each."""
    if not isinstance(values, Mapping | tuple | list):
        yield name, values
        return
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        yield from _columns(f"{name}_{key}", value)


def _beside(targets: Any, values: "Tensor") -> "Tensor":
    """Values (N, 1) as (N,) where targets are one number, so that their columns have names of one kind."""
    from lockstep.data.source import tensors_in

    is_number = all(target.dim() == 1 for target in tensors_in(targets))
    return values.squeeze(1) if is_number and values.shape[1:] == (1,) else values


def in_order(shares: Sequence[Columns], samples: int) -> Columns:
    """The columns of all samples. shares: of each rank."""
    whole: Columns = {}
    for share in shares:
        for name, values in share.items():
            if name == NUMBERS:
                continue
            if name not in whole:
                whole[name] = values.new_empty((samples, *values.shape[1:]))
            whole[name][share[NUMBERS]] = values
    return whole


def table(
    columns: Columns, classes: Sequence[str], files: Sequence[str] = (), numbers: "Tensor | None" = None
) -> Iterator[str]:
    """The lines of the file.

    classes: names that replace the numbers of classes, empty if they have none.
    files: the name of the file of each sample, empty if they have none.
    numbers: (N,) of the samples in the whole data set; None: this is the whole.
    """
    indices: Iterable[int] = itertools.count() if numbers is None else numbers.tolist()
    flat = {name: values.flatten(1) if values.dim() > 1 else values for name, values in columns.items()}
    header = ["index", "file"] if files else ["index"]
    for name, values in flat.items():
        count = values.shape[1] if values.dim() > 1 else 0
        labels = classes if name == "probability" and len(classes) == count else range(count)
        header += [f"{name}_{label}" for label in labels] if count else [name]
    yield csv_line(header)
    cells = [
        _texts(values, classes if name in OF_CLASSES else (), has_blanks=bool(files) and name == "truth")
        for name, values in flat.items()
    ]
    for place, (index, row) in enumerate(zip(indices, zip(*cells, strict=True), strict=False)):
        yield csv_line([str(index), *files[place : place + 1], *(text for texts in row for text in texts)])


def _texts(values: "Tensor", classes: Sequence[str], has_blanks: bool) -> Iterator[list[str]]:
    """The cells of each row. Floating-point numbers have as many digits as it takes to read the same number again.

    classes: the names of whole numbers, one in a row; empty if they have none.
    has_blanks: whether rows without a target are empty cells.
    """
    import torch

    digits = 17 if values.dtype.itemsize == 8 else 9
    rows = values if values.dim() > 1 else values[:, None]
    no_target = rows.isnan() if values.is_floating_point() else rows == -100  # as data without labels has
    blanks = no_target.all(1).tolist() if has_blanks else itertools.repeat(False)
    for row, is_blank in zip(rows, blanks, strict=False):
        numbers = row.tolist()
        if is_blank:
            yield [""] * len(numbers)
        elif values.is_floating_point():
            yield [f"{number:.{digits}g}" for number in numbers]
        elif values.dim() == 1 and classes and values.dtype != torch.bool:
            yield [classes[number] if 0 <= number < len(classes) else str(number) for number in numbers]
        else:
            yield [str(number) for number in numbers]


def csv_line(cells: Sequence[str]) -> str:
    """With quotes where a name has a comma or a line end."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
