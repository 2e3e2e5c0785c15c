"""A logger that makes torch.save slow, as a disk under load does."""

import time
from pathlib import Path
from typing import Any

import torch

from lockstep.loggers.base import Logger

SECONDS = 3.0
save = torch.save


class SlowFile:
    """A file that takes SECONDS for its second write, and leaves the file `in-save` in the current folder then."""

    def __init__(self, file: Any) -> None:
        self.file, self.writes = file, 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == 2:
            Path("in-save").touch()
            time.sleep(SECONDS)
        written: int = self.file.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class SlowSaves(Logger):
    """Makes each torch.save of this rank slow."""

    def __init__(self) -> None:
        torch.save = lambda contents, file: save(contents, SlowFile(file))
