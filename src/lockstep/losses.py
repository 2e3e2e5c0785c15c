"""What is minimised and what is counted. Each function returns sums, never means: sums add up over any split of the data."""

import torch.nn.functional as F


def classification(outputs, targets):
    """Cross entropy over logits (N, classes) and class numbers (N,).

    Returns the summed loss, which has a gradient, and the sums to report: {"loss", "accuracy"}.
    """
    loss = F.cross_entropy(outputs.float() if outputs.dtype.itemsize < 4 else outputs, targets, reduction="sum")
    correct = (outputs.argmax(dim=1) == targets).sum()
    return loss, {"loss": loss, "accuracy": correct}


def regression(outputs, targets):
    """Squared error over (N, outputs), averaged over a sample's outputs, summed over samples. Reports {"loss"}."""
    loss = F.mse_loss(outputs.float() if outputs.dtype.itemsize < 4 else outputs, targets, reduction="none").flatten(1).mean(1).sum()
    return loss, {"loss": loss}
