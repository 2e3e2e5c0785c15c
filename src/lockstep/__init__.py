"""Lockstep: distributed PyTorch training in which every rank agrees. `load` gives what was trained."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lockstep.modes.trained_net import TrainedNet


def load(
    run: "str | Path",
    which: str = "last",
    device: "str | torch.device" = "cpu",
    model: "torch.nn.Module | None" = None,
) -> "TrainedNet":
    """The net of a trained run, in evaluation mode, with its preprocessing: raw samples in, outputs out.

    run: a run folder or a snapshot. which: "last", "best" or a snapshot's file. model: a net for the weights, if the
    run was trained with a class that is not this project's, torch's or torchvision's. Raises ConfigError if there is no
    such run.
    """
    from lockstep.modes.trained_net import load as load_run

    return load_run(run, which, device, model)
