"""`python src/runs.py why`: what two run folders differ in, and what cannot be compared."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.runs.again import _create, _free_name, command_of, require_repeatable
from lockstep.runs.code import versions
from lockstep.runs.compare import explain
from lockstep.runs.digests import StepTable, first_difference
from lockstep.runs.record import read_run
from lockstep.source_code import hash_of_source, module_hashes
from support.made_runs import make_run


def change(folder: Path, **sections: dict[str, Any]) -> None:
    """Other values in a made run."""
    path = folder / "run.json"
    contents = json.loads(path.read_text())
    for name, values in sections.items():
        (contents["lives"][-1] if name == "life" else contents[name]).update(values)
    path.write_text(json.dumps(contents))


def test_everything_that_differs_has_a_line(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a", seed=1), make_run(tmp_path / "b", 0.25, "stopped", trainer__epochs=7)
    change(one, code={"modules": {"own_net": "1111", "only_here": "2222"}})
    change(
        other,
        code={"source": "ffff", "commit": "75ebc391e89bf5e1bdf6e88733820cc1e8024536", "modules": {"own_net": "3333"}},
        environment={"torch": "2.15.0"},
        data={"training_data": "0123"},
        life={"world_size": 4, "hosts": ["node1", "node2"]},
    )
    (other / "uncommitted.diff").write_text("-one\n+two\n")
    change(other, code={"diff_sha256": "4444", "diff_bytes": 10})
    lines = explain(read_run(one), read_run(other))
    assert [line.split() for line in lines if line.startswith(("config", "code", "env", "data", "ranks"))] == [
        ["config", "seed", "1", "0"],
        ["config", "trainer.epochs", "5", "7"],
        ["code", "src/", "and", "conf/", "baed35b7596fd0b6", "ffff"],
        ["code", "commit", "59029b0b3e9e8f7448ae38e6eccc3a42518d3d6b", "75ebc391e89bf5e1bdf6e88733820cc1e8024536"],
        ["code", "uncommitted", "diff", "-", "4444"],
        ["code", "own_net", "1111", "3333"],
        ["environment", "torch", "2.14.1", "2.15.0"],
        ["data", "training_data", "cda99ef9332e69e6", "0123"],
        ["ranks", "hosts", "[another]", "[node1,node2]"],
        ["ranks", "number", "in", "each", "life", "[2]", "[4]"],
    ]
    assert "the commits:             git diff 59029b0b3e 75ebc391e8 -- src conf" in lines
    assert f"the uncommitted changes: cat {other}/uncommitted.diff" in lines
    assert f"weights: there is no {one}/model.pt" in lines
    assert lines[-1] == f"steps:   {one} has no digests; type trainer.digest=on to let a run write them"
    assert any(
        line.split() == ["result", "state", "finished,", "exit", "code", "0", "stopped,", "exit", "code", "0"]
        for line in lines
    )


def test_commits_that_change_neither_src_nor_conf_are_no_difference(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    change(other, code={"commit": "75ebc391e89bf5e1bdf6e88733820cc1e8024536"})
    for folder in (one, other):
        (folder / "model.pt").write_bytes(b"weights")
    lines = explain(read_run(one), read_run(other))
    assert "the same: config, code, environment, data, ranks" in lines
    assert "weights: the two model.pt hold the same bits" in lines


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("run.json", b"[]", "is no record of format 1; type rm"),
        ("run.json", b'{"format": 2, "lives": [{}]}', "is no record of format 1; type rm"),
        ("digests.bin", b"\xff\xfe\n", "its first line has no names; type rm"),
        ("digests.bin", b"", "its first line has no names; type rm"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    (other / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as refused:
        explain(read_run(one), read_run(other))
    assert str(other) in str(refused.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no run.json \(No such file or directory\); type python src/runs.py"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="does not exist; type python src/runs.py"):
        read_run(tmp_path / "nowhere")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stopped": ({"life": {"state": "stopped"}}, "is stopped, and only a run that has finished has bits"),
    "hosts": ({"life": {"hosts": ["a", "b"]}}, "was started by fork on a, b"),
    "slurm": ({"life": {"launcher": "srun"}}, "was started by srun on another"),
    "package": ({"environment": {"torch": "2.0.0"}}, r"torch was 2.0.0 and is .*; type pip install torch==2.0.0"),
    "python": ({"environment": {"python": "3.9.1"}}, r"python was 3.9.1 and is .*; type the command with Python 3.9.1"),
    "code": ({"code": {"source": "0"}}, "src/ or conf/ have changed since; type git checkout 59029b0b3e$"),
    "diff": (
        {"code": {"source": "0", "diff_bytes": 9}},
        r"type git checkout 59029b0b3e && git apply .*/uncommitted.diff",
    ),
}


def test_digests_of_a_resumed_run_begin_where_the_other_run_ended() -> None:
    first, then = StepTable(["loss", "w"], {10: [1, 2], 20: [3, 4]}), StepTable(["loss", "w"], {30: [5, 6]})
    sentence = "no step is in both: A has digests of the steps 10 to 20, and B of the steps 30 to 30"
    assert first_difference(first, then, with_loss=True) == sentence


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_cannot_be_repeated_is_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "model.pt").write_bytes(b"weights")
    change(folder, environment=versions(), code={"source": hash_of_source()})
    require_repeatable(read_run(folder))
    sections, sentence = REFUSED[name]
    change(folder, **sections)
    with pytest.raises(ConfigError, match=sentence):
        require_repeatable(read_run(folder))


def test_lives_of_different_kinds_are_not_repeated(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "model.pt").write_bytes(b"weights")
    run = read_run(folder)
    first = run["lives"][0]
    with pytest.raises(ConfigError, match="ran on 2, then 1 ranks, and where it stopped is not repeated"):
        require_repeatable(run | {"lives": [first, first | {"world_size": 1}]})
    with pytest.raises(ConfigError, match="was resumed with another config or other code"):
        require_repeatable(run | {"lives": [first, first | {"config_hash": "0"}]})


def test_a_repetition_starts_where_the_run_started(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before")
    run = read_run(make_run(tmp_path / "a", resume="before"))
    run["lives"][0] |= {"from_step": 46, "launcher": "torchrun"}
    with pytest.raises(ConfigError, match="started from step 46 of .*/before, and that snapshot is gone"):
        command_of(run, tmp_path / "new")
    snapshot = before / "snapshots" / "step_00000046.pt"
    snapshot.parent.mkdir()
    snapshot.touch()
    assert command_of(run, tmp_path / "new")[2:] == [
        f"resume={snapshot}",
        "launch=torchrun",
        "launch.nproc_per_node=2",
        f"hydra.run.dir={tmp_path / 'new'}",
    ]
    # A sweep names its folders key=value, and a person as she likes.
    assert command_of(run, tmp_path / 'lr=1 "a"')[-1] == f'hydra.run.dir="{tmp_path}/lr=1 \\"a\\""'


def test_a_repetition_has_a_place_wherever_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "snapshots").mkdir()
    for where, typed in ((folder, "."), (folder / "snapshots", ".."), (tmp_path, "a")):
        monkeypatch.chdir(where)
        assert _free_name(Path(typed)) == tmp_path / "a-again"
    _create(tmp_path / "new" / "one")
    with pytest.raises(ConfigError, match="one exists already; type --into <a new folder>"):
        _create(tmp_path / "new" / "one")
    with pytest.raises(ConfigError, match=r"run.json/b cannot be created \(Not a directory\); type --into"):
        _create(folder / "run.json" / "b")


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
