"""Snapshots on the disk: whole or not at all, whatever moment a run is killed at; any part of a tensor can be read."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.snapshots import sharded
from lockstep.snapshots.checkpointer import interval
from lockstep.snapshots.files import (
    FORMAT,
    MANIFEST,
    STATE,
    finish_snapshot,
    list_snapshots,
    of_files,
    prune,
    remove_leftovers,
    verify,
    write_tensors,
)
from lockstep.snapshots.find import (
    find_snapshots,
    load_first_good,
    log_config_changes,
    snapshots_to_try,
)
from lockstep.snapshots.sharded import load_shards, save_shards
from lockstep.snapshots.state import as_held
from support.killed_disk import Disk

MATRIX = torch.arange(28, dtype=torch.float64).view(7, 4)


def in_four(tensor: Tensor, rank: int) -> tuple[Tensor, tuple[int, int]]:
    """A quarter of a matrix: rows and columns are cut in two, not in the middle."""
    rows, columns = (slice(0, 3), slice(3, None))[rank // 2], (slice(0, 1), slice(1, None))[rank % 2]
    return tensor[rows, columns].contiguous(), (rows.start, columns.start)


def write(folder: Path, name: str, state: dict[str, Any], *others: str) -> Path:
    write_tensors(folder / f"{name}.tmp" / STATE, state)
    return finish_snapshot(folder, name, of_files(folder / f"{name}.tmp", [STATE, *others]))


def save(folder: Path, name: str, value: int, cut: bool = False) -> Path:
    """A snapshot of a number and a matrix. cut: the matrix is in the shards of four ranks."""
    matrix, names = MATRIX + value, list[str]()
    if cut:
        for rank in range(4):
            names += save_shards({"model/weight": in_four(matrix, rank)}, folder / f"{name}.tmp", rank)
        matrix = matrix.to("meta")
    return write(folder, name, {"value": value, "model": {"weight": matrix}}, *names)


def loaded(paths: list[Path]) -> tuple[int, Path]:
    """(value, path) of the first good one, whose matrix is right."""
    saved, path = load_first_good(paths)
    assert torch.equal(as_held("model", saved["model"], {}, path)["weight"], MATRIX + saved["value"])
    return saved["value"], path


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", ["best_{:08d}", "step_{:08d}", "step_00000001"])
def test_killed_at_any_moment_a_whole_snapshot_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, cut: bool
) -> None:
    disk, kind, keep = Disk(monkeypatch), name[:4], 1

    def save_and_prune(value: int) -> None:
        save(tmp_path, name.format(value), value, cut)
        prune(tmp_path, keep)

    assert disk.save(partial(save_and_prune, 0), last=1000)
    value, moments, finished = 0, 0, False
    while not finished:
        finished = disk.save(partial(save_and_prune, value + 1), last=moments)
        now, path = loaded(list_snapshots(tmp_path, kind))
        assert path == list_snapshots(tmp_path, kind)[0]  # nothing was passed over
        assert now in (value, value + 1), f"killed at file operation {moments}"
        assert now == value + 1 or not finished
        if moments % 2:  # it is started again
            remove_leftovers(tmp_path)
            assert not [*tmp_path.glob("*.tmp"), *tmp_path.glob("*.old")]
            assert loaded(list_snapshots(tmp_path, kind))[0] == now
        value, moments = now, moments + 1
    assert moments > 6  # files were opened, written, synced and replaced, folders were renamed and removed
    assert len(list_snapshots(tmp_path, kind)) == 1
    assert "passed over" not in caplog.text


def test_the_best_one_that_the_newest_snapshot_knows_stays_until_there_is_a_newer_one(tmp_path: Path) -> None:
    for name, left in (
        ("step_1", ["step_1"]),
        ("best_2", ["best_2", "step_1"]),
        ("step_2", ["best_2", "step_1", "step_2"]),
        ("best_4", ["best_2", "best_4", "step_1", "step_2"]),
        ("best_5", ["best_2", "best_5", "step_1", "step_2"]),
        ("step_6", ["best_5", "step_2", "step_6"]),
    ):
        save(tmp_path, name, 0)
        prune(tmp_path, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == left


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    (STATE, lambda path: path.write_bytes(path.read_bytes()[:-1]), "its state.pt is cut off or changed"),
    (STATE, flip, "its state.pt is cut off or changed"),
    ("shard-00003-model-00001-of-00001.safetensors", Path.unlink, "[Errno 2] No such file or directory: "),
    (
        "shard-00002-model-00001-of-00001.safetensors",
        flip,
        "its shard-00002-model-00001-of-00001.safetensors is cut off or changed",
    ),
    (MANIFEST, lambda path: path.write_text("{"), "Expecting property name enclosed in double quotes"),
    (MANIFEST, Path.unlink, "[Errno 2] No such file or directory: "),
]


def test_damaged_snapshots_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(len(DAMAGES) + 1):
        save(tmp_path, f"step_{step:08d}", step, cut=True)
    *damaged, good = list_snapshots(tmp_path)
    for path, (name, damage, _) in zip(damaged, DAMAGES, strict=True):
        damage(path / name)
    assert loaded(list_snapshots(tmp_path)) == (0, good)
    for path, (_, _, said) in zip(damaged, DAMAGES, strict=True):
        assert f"snapshot {path} is damaged ({said}" in caplog.text
    shutil.rmtree(good)
    with pytest.raises(
        ConfigError, match="none of these 6 snapshots can be read: .*; type another one, such as a best"
    ):
        load_first_good(list_snapshots(tmp_path))


class Evil:
    def __init__(self, harm: Path) -> None:
        self.harm = harm

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.harm}",)


def test_a_strangers_snapshot_runs_no_code_and_reads_no_other_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "step_00000001", {"evil": Evil(tmp_path / "harm")})
    with pytest.raises(ConfigError, match="none of these 1 snapshots can be read: .*; type another one"):
        load_first_good([path])
    assert "it holds more than tensors and plain values, and loading that could run code" in caplog.text
    assert "weights_only" not in caplog.text  # torch's advice is to switch the check off
    assert not (tmp_path / "harm").exists()
    (tmp_path / "secret").write_bytes(b"8 bytes.")
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"files": {"../secret": [8, "0"]}}))
    with pytest.raises(FileNotFoundError, match="step_00000001/secret"):
        verify(path)
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 5}))
    with pytest.raises(ConfigError, match=f"format 5, and this version reads format {FORMAT}; type resume="):
        load_first_good([path])


def own_memory() -> int:
    """Bytes that only this process has, without mapped files."""
    (kilobytes,) = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 2**10


def test_the_ranks_of_a_machine_share_one_copy_of_what_they_read(tmp_path: Path) -> None:
    path = write(tmp_path, "step_00000001", {"weight": torch.ones(2**24)})  # 64 MiB
    before = own_memory()
    saved, _ = load_first_good([path])
    assert float(saved["weight"].sum()) == 2**24
    assert own_memory() - before < 2**24


def test_what_resume_a_mode_and_python_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, new, old, none = (tmp_path / name for name in ("run", "new", "old", "none"))
    step, best = (save(run / "snapshots", name, 3) for name in ("step_00000007", "best_00000003"))
    save(none / "snapshots", "best_00000001", 1)  # nothing to go on from
    (run / "model.pt").touch()
    (old / "snapshots").mkdir(parents=True)
    (old / "snapshots" / "step_00000001.pt").touch()  # of an earlier version
    for name, found in ((run, step), (run / "snapshots", step), (step, step), (best, best)):
        assert find_snapshots(name, new) == [found]
    assert find_snapshots(None, new) == []
    assert find_snapshots(best, run) == find_snapshots(None, run) == [step]  # its own come first
    monkeypatch.chdir(run)  # which is that of another run
    for which, path in (("last", step), ("best", best), (str(best), best)):
        for name in (run, step):
            assert snapshots_to_try(str(name), which, "evaluate") == [path]
    for say, said in (
        (
            lambda: find_snapshots(tmp_path / "no", new),
            "no does not exist; type a run folder or one of its sna",
        ),
        (lambda: find_snapshots(run / "model.pt", new), "model.pt holds no finished snapshot; type a run folder"),
        (lambda: find_snapshots(none, new), "none holds no finished snapshot; type a run folder"),
        (
            lambda: load_first_good(find_snapshots(None, old)),
            "none of these 1 snapshots .*; type another one.* hydra.run.dir=<a new",
        ),
        (lambda: snapshots_to_try(None, "last", "evaluate"), "mode=evaluate needs a trained run; type resume=<a run f"),
        (
            lambda: snapshots_to_try("../no", "last", "load"),
            "^../no does not exist; type a run folder",
        ),
        (lambda: snapshots_to_try(str(run), "no", "load"), "^no does not exist; type a run folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            say()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.uint16, torch.complex128])
def test_a_tensor_in_parts_can_be_read_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Windows of it: tests/runs/test_strategies.py, at several numbers of ranks."""
    monkeypatch.setattr(sharded, "FILE_BYTES", 40)
    matrix = MATRIX.remainder(5).to(dtype)
    files = {
        name
        for rank in range(4)
        for name in save_shards({f"a/{n}": in_four(matrix, rank) for n in range(3)}, tmp_path, rank)
    }
    assert files == {path.name for path in tmp_path.iterdir()}
    assert len(files) > 4 or dtype.itemsize < 4
    found = torch.empty_like(matrix)
    load_shards(tmp_path, {"a/1": found})
    assert found.tolist() == matrix.tolist()
    for name, shape in (("a/1", (9, 4)), ("b", (7, 4))):
        with pytest.raises(ValueError, match=name):
            load_shards(tmp_path, {name: torch.empty(shape, dtype=dtype)})


def test_when_a_snapshot_is_due() -> None:
    for every, found in (("15steps", (15, "step")), ("epochs", (1, "epoch")), ("10min", (10, "min"))):
        assert interval(every) == found
    for wrong in ("", "0steps", "50", "1.5epochs", "steps 5"):
        with pytest.raises(ConfigError, match="epochs, steps or minutes, such as 50steps; type snapshot.every="):
            interval(wrong)


def test_a_logger_is_no_change_of_the_config(caplog: pytest.LogCaptureFixture) -> None:
    then = {"logger.tensorboard.run_dir": "a", "logging.every": 10}
    with caplog.at_level("INFO"):
        log_config_changes(then, then | {"logger.tensorboard.run_dir": "b"})
        assert caplog.text == ""
        log_config_changes(then, then | {"logging.every": 9})
        assert "logging.every (10 in the snapshot, 9 now)" in caplog.text
