"""Fixtures that start commands."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commands import TRAIN, Command


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """start(*words, **environment) -> a running Command, in an empty folder."""
    started: list[Command] = []

    def start_command(*words: str, **env: object) -> Command:
        cwd = env.pop("cwd", tmp_path)
        started.append(Command(list(words), Path(str(cwd)), **env))
        return started[-1]

    yield start_command
    for command in started:
        if command.process.poll() is None:
            command.kill_group()
            command.process.wait()


@pytest.fixture
def train(start: Callable[..., Command]) -> Callable[..., Command]:
    """train(*overrides, code=0, **environment) -> a finished `python src/train.py`."""

    def train_command(*overrides: str, code: int | None = 0, **env: object) -> Command:
        return start(sys.executable, TRAIN, *overrides, **env).finish(code)

    return train_command
