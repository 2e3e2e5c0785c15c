"""A disk under a process that is killed at any of its file operations, while it saves a snapshot."""

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.snapshots import files, parts


class Killed(BaseException):
    """Stands for SIGKILL: once it is raised, no later file operation has any effect."""


class Disk:
    """Counts the file operations of lockstep.snapshots, and raises Killed from number `last` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.last = 0, 0
        for module in (files, parts):
            monkeypatch.setattr(module, "open", self.guarded(builtins.open), raising=False)
        for owner, name in ((os, "replace"), (os, "fsync"), (os, "unlink"), (Path, "unlink")):
            monkeypatch.setattr(owner, name, self.guarded(getattr(owner, name)))
        monkeypatch.setattr(torch, "save", self.partial(torch.save))
        monkeypatch.setattr(files, "_write_json", self.partial(files._write_json))

    def killed_now(self) -> bool:
        self.count += 1
        return self.count > self.last

    def guarded(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.killed_now():
                raise Killed
            return operation(*args, **kwargs)

        return call

    def partial(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """A write that is killed in the middle leaves some bytes."""

        def call(*args: Any) -> Any:
            if self.killed_now():
                (file,) = [value for value in args if hasattr(value, "write")]
                file.write(b"half")
                raise Killed
            return write(*args)

        return call

    def save(self, save: Callable[[], object], last: int) -> bool:
        """Whether `save` came to its end, with at most `last` file operations."""
        self.count, self.last = 0, last
        try:
            save()
            return True
        except Killed:
            return False
        finally:
            self.last = 10**9
