"""mode=train, the default."""

from lockstep.modes.base import Mode


class Train(Mode):
    """Trains: `train_worker` in src/train.py."""

    name, trains = "train", True
