"""What is minimised and what is counted. Each returns sums, never means: sums add up over any split of the data."""

import torch.nn.functional as F


class Classification:
    """Cross entropy over logits (N, classes) and class numbers (N,).

    Returns the summed loss, which has a gradient, and the sums to report.
    """

    names = ("loss", "accuracy")

    def __call__(self, outputs, targets):
        loss = F.cross_entropy(_wide(outputs), targets, reduction="sum")
        return loss, {"loss": loss, "accuracy": (outputs.argmax(dim=1) == targets).sum()}


class Regression:
    """Squared error over (N, outputs), averaged over a sample's outputs. Returns as Classification does."""

    names = ("loss",)

    def __call__(self, outputs, targets):
        loss = F.mse_loss(_wide(outputs), targets, reduction="none").flatten(1).mean(1).sum()
        return loss, {"loss": loss}


def _wide(outputs):
    """Half-precision outputs in float32: a loss is a sum of many small numbers."""
    return outputs.float() if outputs.dtype.itemsize < 4 else outputs
