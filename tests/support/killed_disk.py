"""A disk under a process that is killed at any of its file operations, while it saves a snapshot."""

import builtins
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

import lockstep.files
import lockstep.snapshots.files


class Killed(BaseException):
    """Stands for SIGKILL: once it is raised, no later file operation has any effect."""


class KilledFile:
    """A file that is open for writing."""

    def __init__(self, file: BinaryIO, disk: "Disk") -> None:
        self.file, self.disk = file, disk
        self.flush, self.fileno = file.flush, file.fileno

    def write(self, content: Any) -> None:
        self.disk.write(self.file, lambda file: file.write(content))

    def __enter__(self) -> "KilledFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


class Disk:
    """Counts the file operations of lockstep.snapshots, and raises Killed from number `last` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.last = 0, 0
        for module in (lockstep.files, lockstep.snapshots.files):
            monkeypatch.setattr(module, "open", self.open, raising=False)
        for owner, name in ((os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "rename")):
            monkeypatch.setattr(owner, name, self.guarded(getattr(owner, name)))
        for name in ("unlink", "rename"):
            monkeypatch.setattr(Path, name, self.guarded(getattr(Path, name)))
        torch_save = torch.save
        monkeypatch.setattr(torch, "save", lambda value, file: self.write(file.file, partial(torch_save, value)))

    def killed_now(self) -> bool:
        self.count += 1
        return self.count > self.last

    def guarded(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.killed_now():
                raise Killed
            return operation(*args, **kwargs)

        return call

    def open(self, path: Any, mode: str = "r") -> Any:
        file = self.guarded(builtins.open)(path, mode)
        return KilledFile(file, self) if mode == "wb" else file

    def write(self, file: BinaryIO, write: Callable[[BinaryIO], Any]) -> None:
        """A write that is killed in the middle leaves some bytes."""
        if self.killed_now():
            file.write(b"half")
            raise Killed
        write(file)

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
