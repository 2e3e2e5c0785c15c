"""A transform that writes down which samples the workers read."""

import os
from typing import Any

import torch


class WrittenDown:
    """Writes the first value of each sample into a file of `folder`, which each worker has for itself."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, sample: Any) -> Any:
        if torch.utils.data.get_worker_info() is not None:  # else it is looked at before the training
            with open(os.path.join(self.folder, str(os.getpid())), "a") as file:
                print(int(sample[0][0]), file=file)
        return sample
