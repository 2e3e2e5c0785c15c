"""The contract of a model whose first weights depend on the training data."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class WeightsFromData(Protocol):
    """`set_weights_from` is called once, before the strategy takes the model, on every rank with the same inputs."""

    samples_wanted: int  # the first training samples, as many as there are of these

    def set_weights_from(self, inputs: Tensor) -> None:
        """inputs (N, ...): training samples as the model gets them, on its device, not augmented."""
