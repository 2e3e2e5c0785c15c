"""Lockstep: distributed PyTorch training in which every rank agrees. `load` gives what was trained."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from lockstep.modes.trained_net import TrainedNet


def load(
    run: "str | Path",
    which: str = "last",
    device: "str | torch.device" = "cpu",
    model: "torch.nn.Module | Callable[..., torch.nn.Module] | None" = None,
) -> "TrainedNet":
    """The net of a trained run, in evaluation mode, with its preprocessing: raw samples in, outputs out.

    run: a run folder or a snapshot.
    which: "last", "best" or a snapshot's file.
    device: where the net computes.
    model: for a run that was trained with a class or a function of your own: this class or function, which is called
        with the arguments of the run, or a net for the weights.

    Raises ConfigError if there is no such run.
    """
    from lockstep.modes.trained_net import load as load_run

    return load_run(run, which, device, model)
