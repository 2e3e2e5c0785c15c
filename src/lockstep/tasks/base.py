"""The contract of a task: what is minimised, and what is measured.

To add one: a class in a file of its own here, and `conf/task/<name>.yaml` with its `_target_`, its metrics and the
metric to monitor. A task that can show more than numbers returns a `Report`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.data.dataset import count_samples
from lockstep.distributed.world import World
from lockstep.errors import ConfigError

ReadSample = Callable[[int], Tensor]
"""The test sample of a number, as the data set has it."""


@dataclass(frozen=True)
class Share:
    """Which test samples this rank evaluates, in this order: rank, rank + size, rank + 2 size, ... below `samples`."""

    rank: int
    size: int
    samples: int


class Report:
    """What an evaluation shows beside its means. Every rank makes a new one for each evaluation.

    `add` is called for each batch, then `reduce`, then on rank 0 perhaps `figures`. This one shows nothing.
    """

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in the next samples of this rank's share. It must not wait for the device."""

    def reduce(self, world: World) -> None:
        """Bring together what the ranks have. A collective. A rank may have had no samples."""

    def figures(self, sample: ReadSample, classes: Sequence[str]) -> dict[str, Tensor]:
        """{tag: image (3, height, width) with values from 0 to 1}. classes: their names, empty if they have none."""
        return {}


class Task:
    """A loss and its metrics, as sums over samples: sums add up over any split of the data, means do not.

    A mean is a sum over a whole global batch or data set, divided by its `count`: of samples, or of what a task says.

    metrics: {name: "min" or "max"}, which says for each metric whether lower or higher is better. "loss" is the first.
    monitor: the metric of the default objective, which decides which weights are the best ones. Raises ConfigError if
    it is not in `metrics`.
    sums: an attribute, {name: number of values} of what a call returns. By default one value for each metric. A task
    whose metrics are no means, such as F1, returns counts instead, and makes metrics of their totals in `finish`.
    counts: what `count` counts, in the plural.
    """

    counts = "samples"

    def __init__(self, metrics: dict[str, str], monitor: str) -> None:
        if monitor not in metrics:
            names = " or ".join(f"task.monitor={name}" for name in metrics)
            raise ConfigError(f"task.monitor={monitor} is not a metric of this task; type {names}")
        self.metrics, self.monitor = metrics, monitor
        self.sums = dict.fromkeys(metrics, 1)

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(outputs of the model, targets) -> (the summed loss, which has a gradient; {name: sum}).

        The sums have the names and numbers of values of `self.sums`; one value is a 0-d tensor. "loss" is one of them.
        """
        raise NotImplementedError

    def count(self, targets: Any) -> int | Tensor:
        """What these targets, a tensor (N, ...) or a tuple or dict of such, add to what a mean is divided by: N.

        Where it depends on their values, as with labels that are ignored: a 0-d tensor of whole numbers, on their
        device. The ranks then add up their counts before each step.
        """
        return count_samples(targets)

    def finish(self, totals: dict[str, Tensor], count: int) -> dict[str, float]:
        """{metric: value} from the sums over all ranks (float64, on the CPU) and the count that is behind them."""
        return {name: total.item() / max(count, 1) for name, total in totals.items()}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """{column: (N,) or (N, values, ...)}: what mode=predict writes of the outputs (N, ...)."""
        return {"output": outputs}

    def report(self, share: Share, images: int) -> Report | None:
        """What an evaluation shall show. images: how many test samples at most. None: nothing but the metrics."""
        return None

    def mode(self, objective: str) -> str:
        """ "min" or "max" for an objective such as "test/accuracy". Raises ConfigError if no evaluation measures it."""
        name = objective.removeprefix("test/")
        if name not in self.metrics or not objective.startswith("test/"):
            names = " or ".join(f"objective=test/{name}" for name in self.metrics)
            raise ConfigError(f"objective={objective} is not measured; type {names}")
        return self.metrics[name]


def at_least_float32(outputs: Tensor) -> Tensor:
    """Half-precision outputs as float32: a loss is a sum of many small numbers."""
    return outputs.float() if outputs.dtype.itemsize < 4 else outputs
