"""What is read of run folders, and what is no run."""

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.runs.record import read_run, state_of
from lockstep.source_code import module_hashes
from support.made_runs import make_run


def change(folder: Path, **sections: dict[str, Any]) -> None:
    """Other values in a made run."""
    path = folder / "run.json"
    contents = json.loads(path.read_text())
    for name, values in sections.items():
        (contents["lives"][-1] if name == "life" else contents[name]).update(values)
    path.write_text(json.dumps(contents))


@pytest.mark.parametrize("content", [b"[]", b'{"format": 2, "lives": [{}]}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "run.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is no record of format 1; type rm") as refused:
        read_run(folder)
    assert str(folder) in str(refused.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no run.json \(No such file or directory\); type python src/runs.py"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="does not exist; type python src/runs.py"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(("hosts", "seconds", "state"), [("another", 9.0, "running"), ("another", 4000.0, "unknown")])
def test_a_run_of_another_machine_that_writes_nothing_more_does_not_run_for_ever(
    tmp_path: Path, hosts: str, seconds: float, state: str
) -> None:
    folder = make_run(tmp_path / "a", state="running")
    change(folder, life={"hosts": [hosts]})
    for path in (folder / "run.json", folder):
        os.utime(path, (time.time() - seconds,) * 2)
    assert state_of(read_run(folder)) == state


class Unread(ModuleType):
    """A module that nobody may look at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)


def test_modules_of_libraries_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked rank would copy the memory of all of them."""
    found = module_hashes()
    assert "lockstep.source_code" in found
    assert "torch.nn" not in found
    monkeypatch.setitem(sys.modules, "torch.nn", Unread("torch.nn"))
    assert module_hashes() == found
