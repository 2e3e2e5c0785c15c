"""Snapshot files: whole or not at all, whatever moment a run is killed at."""

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.snapshots.files import list_snapshots, remove_leftovers, save_snapshot, step_of
from lockstep.snapshots.manager import BackgroundWriter, SaveInterval
from lockstep.snapshots.resume import (
    MODE,
    PYTHON,
    find_snapshots,
    load_first_good,
    log_config_changes,
    require_same_model,
    snapshots_to_try,
)
from support.killed_disk import Disk


def save(folder: Path, name: str, value: int) -> None:
    save_snapshot(folder, name, {"value": value}, keep_last=2)


def value_of(path: Path) -> int:
    found = load_first_good([path])
    assert found is not None
    return int(found[0]["value"])


@pytest.mark.parametrize("cleaned", [True, False], ids=["started again", "not started again"])
def test_killed_at_any_moment_while_best_is_overwritten_it_can_be_loaded(tmp_path, monkeypatch, caplog, cleaned):
    best, disk = tmp_path / "best.pt", Disk(monkeypatch)
    assert disk.save(partial(save, tmp_path, "best", 0), last=100)
    value, moments, finished = 0, 0, False
    while not finished:
        finished = disk.save(partial(save, tmp_path, "best", value + 1), last=moments)
        now = value_of(best)
        assert now in (value, value + 1), f"killed at file operation {moments}"
        assert now == value + 1 or not finished
        value, moments = now, moments + 1
        if cleaned:
            remove_leftovers(tmp_path)
            assert not list(tmp_path.glob("*.tmp"))
            assert value_of(best) == value
    assert moments > 3  # a file was opened, written, synced and replaced
    assert "and passed over" not in caplog.text


def test_killed_at_any_moment_a_numbered_snapshot_can_be_loaded(tmp_path, monkeypatch, caplog):
    disk, step = Disk(monkeypatch), 0
    assert disk.save(partial(save, tmp_path, "step_00000000", 0), last=100)
    for last in range(100):
        step += 1
        finished = disk.save(partial(save, tmp_path, f"step_{step:08d}", step), last)
        newest = list_snapshots(tmp_path)[0]
        assert value_of(newest) == int(newest.stem[5:])
        if finished:
            break
    assert value_of(newest) == step
    assert len(list_snapshots(tmp_path)) == 2
    assert "and passed over" not in caplog.text


def test_damaged_snapshots_are_passed_over(tmp_path, caplog):
    for step in range(1, 6):
        save_snapshot(tmp_path, f"step_{step:08d}", {"step": step}, keep_last=4)
    newest, second, third, fourth = list_snapshots(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-10])  # truncated
    flipped = bytearray(second.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    second.write_bytes(flipped)
    third.write_text("no archive")
    found = load_first_good(list_snapshots(tmp_path))
    assert found is not None
    assert (found[0]["step"], found[1]) == (2, fourth)
    assert caplog.text.count("and passed over") == 3
    fourth.write_bytes(b"")
    with pytest.raises(ConfigError, match="none of the 4 snapshots .* type that and resume=<another snapshot>"):
        load_first_good(list_snapshots(tmp_path))


def test_a_damaged_snapshot_that_was_named_moves_no_good_ones(tmp_path):
    save(tmp_path, "step_00000001", 1)
    save(tmp_path, "best", 1)
    (tmp_path / "best.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="can be read; type resume=<another snapshot>$"):
        load_first_good(find_snapshots(tmp_path / "best.pt", tmp_path / "elsewhere"))


def test_an_older_snapshot_that_cannot_be_removed_costs_a_warning(tmp_path, caplog):
    (tmp_path / "step_00000001.pt").mkdir()  # which unlink refuses
    for step in range(2, 6):
        save(tmp_path, f"step_{step:08d}", step)
    assert [step_of(path) for path in list_snapshots(tmp_path)] == [5, 4, 1]
    assert value_of(tmp_path / "step_00000005.pt") == 5
    *_, warning = caplog.messages
    said = f"{tmp_path}/step_00000005.pt is saved, but not all older ones are removed: "
    assert warning.startswith(said)
    assert warning.endswith(f"check {tmp_path}; training goes on")


def test_leftovers_that_cannot_be_removed_cost_a_warning(tmp_path, caplog):
    (tmp_path / "best.pt.tmp").mkdir()
    (tmp_path / "step_00000001.pt.tmp").write_bytes(b"half")
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "best.pt.tmp"]
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path}/best.pt.tmp is of no snapshot and cannot be removed (")
    assert warning.endswith("); move it away")


class Evil:
    def __init__(self, harm: Path) -> None:
        self.harm = harm

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.harm}",)


def test_a_snapshot_that_would_run_code_is_not_loaded(tmp_path, caplog):
    save_snapshot(tmp_path, "step_00000001", {"evil": Evil(tmp_path / "harm")}, keep_last=1)
    with pytest.raises(ConfigError, match="none of the 1 snapshots in .* can be read; to start afresh type mv "):
        load_first_good([tmp_path / "step_00000001.pt"])
    assert "it holds more than tensors and plain values, and loading that could run code" in caplog.text
    assert "weights_only" not in caplog.text  # torch's advice is to switch the check off
    assert not (tmp_path / "harm").exists()


def test_resume_wants_a_snapshot(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pt")
    for name in ("notes.txt", "run.json"):
        (tmp_path / name).write_text("hello")
    save_snapshot(tmp_path / "snapshots", "step_00000007", {"step": 7}, keep_last=1)
    elsewhere = tmp_path / "elsewhere"
    weights = f"model.pt holds only weights, and training also needs the optimizer's state; type resume={tmp_path}"
    for where, said in (
        ("model.pt", weights),
        ("notes.txt", f"notes.txt is not a snapshot; type resume={tmp_path}"),
        ("run.json", f"run.json is not a snapshot; type resume={tmp_path}"),
        ("nowhere", "nowhere does not exist; to start afresh leave resume= out"),
    ):
        with pytest.raises(ConfigError) as refused:
            find_snapshots(tmp_path / where, elsewhere)
        assert said in str(refused.value)
    assert find_snapshots(tmp_path, elsewhere) == find_snapshots(tmp_path / "snapshots", elsewhere)
    assert find_snapshots(None, elsewhere) == []
    assert [path.stem for path in find_snapshots(None, tmp_path)] == ["step_00000007"]


def test_a_mode_takes_the_snapshots_that_were_named_wherever_it_was_typed(tmp_path, monkeypatch):
    """A working directory with snapshots of its own is that of another run."""
    for name in ("here", "named"):
        for file in ("step_00000001", "best"):
            save(tmp_path / name / "snapshots", file, 1)
    monkeypatch.chdir(tmp_path / "here")
    for which in ("last", "best", "../named/snapshots/step_00000001.pt"):
        paths = snapshots_to_try("../named", which, "evaluate")
        assert [path.parent.parent for path in paths] == [Path("../named")]


def test_what_a_mode_or_python_is_told_is_what_can_be_typed_there(tmp_path):
    """Neither can start afresh."""
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pt")
    save(tmp_path / "snapshots", "step_00000001", 1)
    asked = [(str(tmp_path), str(tmp_path / "model.pt")), (str(tmp_path / "no"), "last"), (str(tmp_path), "no")]
    for keys in (MODE, PYTHON):
        sentences = []
        for run, which in asked:
            with pytest.raises(ConfigError) as refused:
                snapshots_to_try(run, which, "evaluate", keys)
            sentences.append(str(refused.value))
        only_weights, no_run, no_snapshot = sentences
        weights = f"{keys.which}={tmp_path}/model.pt holds only weights, and a snapshot also tells their step"
        assert only_weights == f"{weights}; type {keys.which}=last"
        folder = f"type {keys.run}=<a run folder or one of its snapshots/step_*.pt>"
        assert no_run == f"{keys.run}={tmp_path}/no does not exist; {folder}"
        assert no_snapshot.endswith(f"{keys.which}=best or {keys.which}={tmp_path}/snapshots/step_00000001.pt")
        (tmp_path / "snapshots" / "step_00000001.pt").write_bytes(b"")
        for best, way in ((False, "<another snapshot>"), (True, "best")):
            if best:
                save(tmp_path / "snapshots", "best", 1)
            with pytest.raises(ConfigError, match=f"can be read; type {keys.which}={way}$"):
                load_first_good(snapshots_to_try(str(tmp_path), "last", "evaluate", keys), keys)
        (tmp_path / "snapshots" / "best.pt").unlink()


def test_the_writer_is_never_more_than_two_snapshots_behind():
    writer, gate, written = BackgroundWriter(max_pending=2), threading.Event(), []

    def write(number: int) -> None:
        gate.wait()
        written.append(number)

    writer.put(write, 0)
    writer.put(write, 1)  # training goes on
    threading.Timer(0.1, gate.set).start()
    writer.put(write, 2)  # waits for the first
    assert written[0] == 0
    writer.close()
    assert written == [0, 1, 2]


def test_when_a_snapshot_is_due():
    steps = SaveInterval("15steps")
    assert [step for step in range(1, 47) if steps.due_after_step(step)] == [15, 30, 45]
    epochs = SaveInterval("2epochs")
    assert [epoch for epoch in range(1, 6) if epochs.due_after_epoch(epoch)] == [2, 4]
    assert not epochs.due_after_step(2)
    minutes = SaveInterval("10min")
    assert not minutes.due_by_clock()
    minutes.last_time -= 600
    assert [minutes.due_by_clock(), minutes.due_by_clock()] == [True, False]


def test_the_folder_of_a_logger_is_no_change_of_the_config(caplog: pytest.LogCaptureFixture) -> None:
    then = {"logger.tensorboard.run_dir": "a", "logger.tensorboard.images": 25}
    with caplog.at_level("INFO"):
        log_config_changes(then, then | {"logger.tensorboard.run_dir": "b"})
        assert caplog.text == ""
        log_config_changes(then, then | {"logger.tensorboard.images": 9})
        assert "logger.tensorboard.images (25 in the snapshot, 9 now)" in caplog.text


def test_a_net_of_other_code_is_no_other_model_that_was_typed() -> None:
    saved = {"model.width": 8, "seed": 0}
    with pytest.raises(
        ConfigError, match=r"another model: .*model.width \(8 in the snapshot, 9 here\); .* leave out model="
    ):
        require_same_model(Path("a.pt"), saved, {"model.width": 9, "model.tied": False})
    with pytest.raises(
        ConfigError, match=r"version of the code: model.tied \(nothing in .* type git checkout <the commit"
    ):
        require_same_model(Path("a.pt"), saved, {"model.width": 8, "model.tied": False})
