"""Lockstep: distributed PyTorch training in which every rank agrees.

`train` trains from a notebook or a script, `load` gives what was trained, `table` the runs of a folder, and `compose`
the config of a command. Each imports what it needs when it is called.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from omegaconf import DictConfig

    from lockstep.modes.trained_net import TrainedNet
    from lockstep.notebook import Result


def train(words: "Sequence[str]" = (), ranks: int | None = None) -> "Result":
    """Train as `python src/train.py <words>` does, in processes of its own, and print what these print.

    words: such as ["model=mlp", "trainer.epochs=3"]. Modules of yours that they name are found in this folder and on
        PYTHONPATH; what was defined in a cell is not.
    ranks: processes that train together on this machine (launch=torchrun); None: one, or what `words` say.

    An interrupt lets the ranks save a snapshot, and is raised again when they have ended. Raises ConfigError for words
    that cannot work, and RankFailed if the training fails, after its report was printed.
    """
    from lockstep.notebook import train as train_words

    return train_words(words, ranks)


def compose(words: "Sequence[str]" = ()) -> "DictConfig":
    """The config of `python src/train.py <words>`, checked and with its interpolations resolved. Starts nothing.

    Raises ConfigError for words that cannot work, with what to type instead.
    """
    from lockstep.notebook import compose as compose_words

    return compose_words(words)


def table(folder: "str | Path" = "outputs") -> list[dict[str, Any]]:
    """The runs at or below `folder`, oldest first: a dict of `python src/runs.py table`'s columns for each.

    `pandas.DataFrame` takes it. Raises ConfigError for a folder that is missing.
    """
    from lockstep.notebook import table as table_of

    return table_of(folder)


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
