"""Snapshots on the disk: whole or not at all, whatever moment a run is killed at; any part of a tensor can be read."""

import json
import os
import re
import resource
import signal
import sys
from itertools import chain, count
from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.snapshots import files, state
from lockstep.snapshots.files import MANIFEST, STATE, list_snapshots, load_first_good, named_snapshots, snapshots_to_try
from lockstep.snapshots.state import as_held, load_shards, save_shards

MATRIX = torch.arange(28, dtype=torch.float64).view(7, 4)


def in_four(tensor, rank):
    """A quarter of a matrix: rows and columns are cut in two, not in the middle."""
    rows, columns = (slice(0, 3), slice(3, None))[rank // 2], (slice(0, 1), slice(1, None))[rank % 2]
    return tensor[rows, columns].contiguous(), (rows.start, columns.start)


def save(folder, name, value, cut=False):
    """A snapshot of a value and a matrix. cut: the matrix is in the shards of four ranks."""
    unfinished, names = folder / f"{name}.tmp", [STATE]
    matrix = MATRIX + (value if isinstance(value, int) else 0)
    for rank in range(4 * cut):
        names += save_shards({"model/weight": in_four(matrix, rank)}, unfinished, rank)
    weight = matrix.to("meta") if cut else matrix
    files.write_tensors(unfinished / STATE, {"value": value, "model": {"weight": weight}})
    return files.finish_snapshot(folder, name, files.of_files(unfinished, names))


def loaded(paths):
    saved, path = load_first_good(paths)
    assert torch.equal(as_held(saved, "model", path, ["weight"], {})["weight"], MATRIX + saved["value"])
    return saved["value"], path


OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def ends(save, operation, size):
    """Whether a process ends `save`. It is killed at its file operation of this number, or by a file of this size."""
    if (child := os.fork()) == 0:
        left = iter(range(operation))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        sys.addaudithook(lambda event, _: os._exit(1) if event in OPERATIONS and next(left, None) is None else None)
        try:
            save()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("name", "cut"), [("best_{:08d}", True), ("step_{:08d}", False), ("step_00000001", True)])
def test_killed_at_any_moment_a_whole_snapshot_is_left(tmp_path, caplog, name, cut):
    def save_and_prune():
        save(tmp_path, name.format(value + 1), value + 1, cut)
        files.prune(tmp_path, 1)

    kind, value = name[:4], 0
    save(tmp_path, name.format(0), 0, cut)
    in_mid_file = [(10**6, size) for size in range(0, 1200, 150)]
    for moment, (operation, size) in enumerate(chain(in_mid_file, ((number, -1) for number in count()))):
        finished = ends(save_and_prune, operation, size)
        now, path = loaded(list_snapshots(tmp_path, kind))
        assert path == list_snapshots(tmp_path, kind)[0]  # nothing was passed over
        assert now == value + 1 or (now == value and not finished), f"killed at {operation} or {size}"
        if moment % 2:  # it is started again
            files.remove_leftovers(tmp_path)
            assert not [*tmp_path.glob("*.tmp"), *tmp_path.glob("*.old")]
            assert loaded(list_snapshots(tmp_path, kind))[0] == now
        value = now
        if finished and size < 0:
            break
    assert operation > 6  # files were opened and replaced, folders were renamed and removed
    assert len(list_snapshots(tmp_path, kind)) == 1
    assert "passed over" not in caplog.text


def test_the_best_one_that_the_newest_snapshot_knows_stays_until_there_is_a_newer_one(tmp_path):
    for name, left in (
        ("step_1", ["step_1"]),
        ("best_2", ["best_2", "step_1"]),
        ("step_2", ["best_2", "step_1", "step_2"]),
        ("best_4", ["best_2", "best_4", "step_1", "step_2"]),
        ("best_5", ["best_2", "best_5", "step_1", "step_2"]),
        ("step_6", ["best_5", "step_2", "step_6"]),
    ):
        save(tmp_path, name, 0)
        files.prune(tmp_path, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == left


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def told(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


class Evil:
    __reduce__ = lambda self: (os.system, ("touch harm",))  # noqa: E731


SHARD = "shard-00003-model-00001-of-00001.safetensors"
DAMAGES = [
    (STATE, lambda path: path.write_bytes(path.read_bytes()[:-1]), "its state.pt is cut off or changed"),
    (STATE, flip, "its state.pt is cut off or changed"),
    (SHARD, Path.unlink, "[Errno 2] No such file or directory: "),
    (SHARD, flip, f"its {SHARD} is cut off or changed"),
    (MANIFEST, lambda path: path.write_text("{"), "Expecting property name enclosed in double quotes"),
    (MANIFEST, Path.unlink, "[Errno 2] No such file or directory: "),
    (MANIFEST, lambda path: told(path, format=5), f"it has the format 5, and this version reads format {files.FORMAT}"),
    (MANIFEST, lambda path: told(path, files={"../secret": [8, "0"]}), "[Errno 2] No such file or directory: "),
    ("", lambda path: save(path.parent, path.name, Evil()), "Weights only load failed"),  # a stranger's runs no code
]


def test_damaged_snapshots_are_passed_over(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(b"8 bytes.")
    for step in range(len(DAMAGES) + 1):
        save(tmp_path, f"step_{step:08d}", step, cut=True)
    *damaged, good = list_snapshots(tmp_path)
    for path, (name, damage, _) in zip(damaged, DAMAGES, strict=True):
        damage(path / name)
    assert loaded(list_snapshots(tmp_path)) == (0, good)
    for path, (_, _, said) in zip(damaged, DAMAGES, strict=True):
        assert f"snapshot {path} is damaged ({said}" in caplog.text
    assert not (tmp_path / "harm").exists()
    with pytest.raises(ConfigError, match="none of these 9 snapshots can be read: .*; type another one, such as a bes"):
        load_first_good(damaged)


def test_the_ranks_of_a_machine_share_one_copy_of_what_they_read(tmp_path):
    def own_memory():
        (kilobytes,) = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(kilobytes) * 2**10

    path = save(tmp_path, "step_00000001", torch.ones(2**24))  # 64 MiB
    before = own_memory()
    assert float(load_first_good([path])[0]["value"].sum()) == 2**24
    assert own_memory() - before < 2**24


def test_what_resume_a_mode_and_python_name(tmp_path, monkeypatch):
    run, none = tmp_path / "run", tmp_path / "none"
    step, best = (save(run / "snapshots", name, 3) for name in ("step_00000007", "best_00000003"))
    save(none / "snapshots", "best_00000001", 1)  # nothing to go on from
    (run / "model.pt").touch()
    (tmp_path / "step_00000001.pt").touch()  # of an earlier version: no fresh start beside it
    monkeypatch.chdir(run)
    found = [(run, [step]), ("snapshots", [Path("snapshots/step_00000007")]), (best, [best]), (None, [])]
    found += [("s3://bucket/run", []), (tmp_path, [tmp_path / "step_00000001.pt"])]
    for name, paths in found:
        assert named_snapshots(name) == paths
    for which, path in (("last", step), ("best", best), (str(best), best)):
        assert snapshots_to_try(str(run), which, "evaluate") == snapshots_to_try(str(step), which, "load") == [path]
    for which, name, said in (
        ("last", "model.pt", "model.pt holds no finished snapshot; type a run folder"),
        ("last", str(none), "none holds no finished snapshot; type a run folder"),
        ("best", str(tmp_path), "has no snapshots/best_.*; type mode.snapshot=last, in Python last"),
    ):
        with pytest.raises(ConfigError, match=said):
            snapshots_to_try(name, which, "evaluate")


def test_any_window_of_a_tensor_in_parts_can_be_read_and_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "FILE_BYTES", 40)
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.uint16, torch.complex128):
        folder, matrix, names = tmp_path / str(dtype), MATRIX.remainder(5).to(dtype), set()
        for rank in range(4):
            names |= {*save_shards({f"a/{n}": in_four(matrix, rank) for n in range(3)}, folder, rank)}
        assert names == {path.name for path in folder.iterdir()}
        assert len(names) > 4 or dtype.itemsize < 4
        for rows, columns in ((slice(0, 7), slice(0, 4)), (slice(2, 5), slice(0, 1)), (slice(4, 7), slice(1, 3))):
            found = torch.empty_like(matrix[rows, columns])
            load_shards(folder, {"a/1": (found, (rows.start, columns.start))})
            assert found.tolist() == matrix[rows, columns].tolist()
        for name, shape in (("a/1", (9, 4)), ("b", (7, 4))):
            with pytest.raises(ValueError, match=name):
                load_shards(folder, {name: (torch.empty(shape, dtype=dtype), (0, 0))})
