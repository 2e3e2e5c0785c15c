"""Loggers that make torch.save and torch.load slow, as a disk under load does."""

import io
import os
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.loggers.base import Logger

save, load = torch.save, torch.load


class SlowFile:
    """A file that takes `seconds` for its second write, and leaves the file `in-save` in the current folder then."""

    def __init__(self, file: Any, seconds: float) -> None:
        self.file, self.seconds, self.writes = file, seconds, 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == 2:
            Path("in-save").touch()
            time.sleep(self.seconds)
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class SlowDisk(Logger):
    """Makes each torch.save of this rank into a file slow, and each torch.load of rank 0 from one."""

    def __init__(self, saves: float = 3.0, loads: float = 0.0) -> None:
        def slow_save(contents: Any, file: Any) -> None:
            save(contents, file if isinstance(file, io.BytesIO) else SlowFile(file, saves))

        def slow_load(*args: Any, **options: Any) -> Any:
            time.sleep(loads * (os.environ["RANK"] == "0" and not isinstance(args[0], io.BytesIO)))
            return load(*args, **options)

        torch.save, torch.load = slow_save, slow_load
