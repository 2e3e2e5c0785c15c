"""Loggers that make torch.save and torch.load slow, as a disk under load does."""

import io
import os
import time
from pathlib import Path

import torch

from lockstep.loggers.base import Logger

save, load = torch.save, torch.load


class SlowFile:
    """A file that takes `seconds` for its second write, and leaves the file `in-save` in the current folder then."""

    def __init__(self, file, seconds):
        self.file, self.seconds, self.writes = file, seconds, 0

    def write(self, data):
        self.writes += 1
        if self.writes == 2:
            Path("in-save").touch()
            time.sleep(self.seconds)
        return int(self.file.write(data))

    def __getattr__(self, name):
        return getattr(self.file, name)


class SlowDisk(Logger):
    """Makes each torch.save of this rank into a file slow, and each torch.load of rank 0 from one."""

    def __init__(self, saves=3.0, loads=0.0):
        def slow_save(contents, file):
            save(contents, file if isinstance(file, io.BytesIO) else SlowFile(file, saves))

        def slow_load(*args, **options):
            time.sleep(loads * (os.environ["RANK"] == "0" and not isinstance(args[0], io.BytesIO)))
            return load(*args, **options)

        torch.save, torch.load = slow_save, slow_load
