"""`python src/runs.py why`: what two run folders differ in, and what cannot be compared."""

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.runs.compare import StepTable, again, first_differing_step, why
from lockstep.runs.record import read_run, state_of, versions
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
    lines = why(read_run(one), read_run(other))
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
    lines = why(read_run(one), read_run(other))
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
        why(read_run(one), read_run(other))
    assert str(other) in str(refused.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no run.json \(No such file or directory\); type python src/runs.py"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="does not exist; type python src/runs.py"):
        read_run(tmp_path / "nowhere")


def test_digests_of_a_resumed_run_begin_where_the_other_run_ended() -> None:
    first, then = StepTable(["loss", "w"], {10: [1, 2], 20: [3, 4]}), StepTable(["loss", "w"], {30: [5, 6]})
    sentence = "no step is in both: A has digests of the steps 10 to 20, and B of the steps 30 to 30"
    assert first_differing_step(first, then, with_loss=True) == sentence


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "hosts": ({"life": {"hosts": ["a", "b"]}}, "it ran on 2 ranks of a, b; start it there likewise"),
    "package": ({"environment": {"torch": "2.0.0"}}, "torch was 2.0.0 and is {torch}; type pip install torch==2.0.0"),
    "python": ({"environment": {"python": "3.9.1"}}, "python was 3.9.1 and is {python}; use Python 3.9.1"),
    "code": ({"code": {"source": "0"}}, "src/ or conf/ have changed since; type git checkout 59029b0b3e"),
    "diff": (
        {"code": {"source": "0", "diff_bytes": 9}},
        "src/ or conf/ have changed since; type git checkout 59029b0b3e && git apply {folder}/uncommitted.diff",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_has_changed_since_a_run_comes_before_the_command_that_repeats_it(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "a")
    change(folder, environment=versions(), code={"source": hash_of_source()})
    assert not [line for line in again(read_run(folder)) if line.startswith("first:")]
    sections, sentence = CHANGED[name]
    change(folder, **sections)
    first, *_ = again(read_run(folder))
    assert first.removeprefix("first:").strip() == sentence.format(folder=folder, **versions())


def test_a_run_is_typed_again_in_a_new_folder_with_each_key_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "a")
    change(folder, environment=versions(), code={"source": hash_of_source()})
    run = read_run(folder) | {"overrides": ["seed=1", "model=mlp", "seed=2"], "flags": ["--config-dir=own"]}
    run["command"] = "python src/train.py seed=1 model=mlp seed=2 --config-dir=own hydra.run.dir=a"
    typed = f"cd {tmp_path} && python src/train.py seed=2 model=mlp --config-dir=own hydra.run.dir={tmp_path}/a-again"
    assert again(run) == [
        f"train again:  {typed}",
        f"compare:      python src/runs.py why {folder} {os.path.relpath(tmp_path / 'a-again')}",
    ]
    (tmp_path / "a-again").mkdir()
    monkeypatch.chdir(tmp_path)
    assert again(run)[0].endswith(
        f"python src/train.py seed=2 model=mlp --config-dir=own hydra.run.dir={folder}-again-2"
    )
    assert "cd" not in again(run)[0].split()
    # A sweep names its folders key=value, and a person as she likes.
    assert r"""'hydra.run.dir="/b/lr=1 \"c\"-again"'""" in again(run | {"folder": '/b/lr=1 "c"'})[0]


def test_a_stopped_run_goes_on_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "a", state="paused", trainer__pause_after=2)
    change(folder, environment=versions(), code={"source": hash_of_source()})
    monkeypatch.chdir(tmp_path)
    assert again(read_run(folder))[:2] == [
        f"go on:        python src/train.py launch=fork hydra.run.dir={folder}",
        f"train again:  python src/train.py launch=fork trainer.pause_after=2 hydra.run.dir={folder}-again",
    ]


def test_a_repetition_starts_where_the_run_started(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before")
    run = read_run(make_run(tmp_path / "a", resume="before"))
    run["lives"][0] |= {"from_step": 46, "launcher": "torchrun"}
    with pytest.raises(ConfigError, match="started from step 46 of .*/before, and that snapshot is gone"):
        again(run)
    snapshot = before / "snapshots" / "step_00000046.pt"
    snapshot.parent.mkdir()
    snapshot.touch()
    words = f"launch=torchrun launch.nproc_per_node=2 resume={snapshot} hydra.run.dir={tmp_path}/a-again"
    assert again(run)[-2].endswith(f"python src/train.py {words}")


def test_the_config_of_each_part_of_a_resumed_run_counts(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    contents = json.loads((other / "run.json").read_text())
    parts = [{"config": {"optimizer.lr": 0.5}}, {"config": {"optimizer.lr": 0.2}}, {}]
    contents["lives"] = [contents["lives"][0] | part for part in parts]
    (other / "run.json").write_text(json.dumps(contents))
    rows = [line.split(maxsplit=3) for line in why(read_run(one), read_run(other))]
    assert ["config", "optimizer.lr", "0.1", "0.5, then 0.2, then 0.1"] in rows
    assert not [row for row in rows if row[1] == "seed"]


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
