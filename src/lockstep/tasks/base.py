"""The contract of a task: what is minimised, and what is measured.

To add one: a class in a file of its own here, and `conf/task/<name>.yaml` with its `_target_`, its metrics and the
metric to monitor.
"""

from torch import Tensor

from lockstep.errors import ConfigError


class Task:
    """A loss and its metrics, as sums over samples: sums add up over any split of the data, means do not.

    metrics: {name: "min" or "max"}, which says for each metric whether lower or higher is better. "loss" is the first.
    monitor: the metric that decides which weights are the best ones. Raises ConfigError if it is not in `metrics`.
    """

    def __init__(self, metrics: dict[str, str], monitor: str) -> None:
        if monitor not in metrics:
            names = " or ".join(f"task.monitor={name}" for name in metrics)
            raise ConfigError(f"task.monitor={monitor} is not a metric of this task; type {names}")
        self.metrics, self.monitor = metrics, monitor

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(outputs of the model, targets) -> (the summed loss, which has a gradient; {metric: 0-d sum})."""
        raise NotImplementedError

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
