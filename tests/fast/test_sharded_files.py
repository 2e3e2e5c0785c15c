"""The files of a sharded snapshot: any window of a tensor, whole or not at all, and nothing that runs code."""

import secrets
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.snapshots.files import (
    describe_parts,
    list_snapshots,
    open_parts,
    parts_of,
    remove_leftovers,
    save_snapshot,
    write_part,
)
from lockstep.snapshots.manager import CopyMemory
from lockstep.snapshots.resume import load_first_good
from lockstep.strategies.tensor_bytes import Block, StoredTensor, whole, whole_block
from support.killed_disk import Disk


def in_four(tensor: Tensor, rank: int) -> Block:
    """A quarter of a matrix: rows and columns are cut in two, not in the middle."""
    rows, columns = (slice(0, 3), slice(3, None))[rank // 2], (slice(0, 1), slice(1, None))[rank % 2]
    return Block(tensor[rows, columns], (rows.start, columns.start), tuple(tensor.shape), tensor.dtype)


def contents_of(rank: int, value: int) -> dict[str, Any]:
    """What a rank of four saves: a matrix in four blocks, and a number that rank 0 alone saves."""
    matrix = torch.arange(28, dtype=torch.float64).view(7, 4) + value
    step = Block(torch.tensor(value) if rank == 0 else None, (), (), torch.int64)
    moments = {"exp_avg": in_four(matrix.bfloat16(), rank), "step": step, "kinds": (1, [None, "a"])}
    return {"model": {"weight": in_four(matrix, rank)}, "optimizer": {"state": {"weight": moments}}, "ema": None}


def save(folder: Path, name: str, value: int) -> None:
    """What the ranks do together."""
    parts = folder / f"{name}.parts.{secrets.token_hex(4)}"
    reports = [write_part(parts / f"rank_{rank}.bin", contents_of(rank, value)) for rank in range(4)]
    contents = {"value": value} | describe_parts(parts, reports)
    save_snapshot(folder, name, contents, keep_last=2)


def loaded(paths: list[Path]) -> tuple[int, Path]:
    """(value, path) of the first good one, whose tensors are right."""
    found = load_first_good(paths)
    assert found is not None
    contents, path = found
    expected = torch.arange(28, dtype=torch.float64).view(7, 4) + contents["value"]
    moments = whole(contents["optimizer"]["state"]["weight"])
    assert torch.equal(whole(contents["model"]["weight"]), expected)
    assert torch.equal(moments["exp_avg"], expected.bfloat16())
    assert (moments["step"].item(), moments["kinds"]) == (contents["value"], (1, [None, "a"]))
    return contents["value"], path


def test_any_window_of_a_tensor_can_be_read(tmp_path: Path) -> None:
    save(tmp_path, "step_00000001", 5)
    found = load_first_good([tmp_path / "step_00000001.pt"])
    assert found is not None
    stored, matrix = found[0]["model"]["weight"], torch.arange(28, dtype=torch.float64).view(7, 4) + 5
    assert isinstance(stored, StoredTensor)
    for top in range(7):
        for bottom in range(top, 8):
            window = stored.read((top, 1), (bottom - top, 2))
            assert torch.equal(window, matrix[top:bottom, 1:3])
    with pytest.raises(ValueError, match="4 of 20 numbers of a tensor are there"):
        stored.read((5, 2), (2, 10))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64])
def test_tensors_of_any_kind_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"none": torch.zeros(0, 3), "number": torch.tensor(1), "turned": torch.arange(6).view(2, 3).T}
    named = {name: whole_block(tensor.to(dtype)) for name, tensor in tensors.items()}
    report = write_part(tmp_path / "a.parts.0" / "rank_0.bin", {"model": named, "optimizer": {}, "ema": None})
    contents = open_parts(tmp_path / "a.pt", describe_parts(tmp_path / "a.parts.0", [report]), check=True)
    for name, tensor in whole(contents["model"]).items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, tensors[name].to(dtype))


def test_a_copy_takes_the_memory_of_the_copy_before() -> None:
    memory, value = CopyMemory(), torch.arange(6, dtype=torch.float64).view(2, 3)
    state = {"weight": whole_block(value), "missing": Block(None, (), (), value.dtype), "step": [torch.tensor(1), 2]}

    def copied() -> tuple[Tensor, Tensor]:
        copy = memory.plain_copy(state)
        assert (copy["missing"].values, copy["step"][1]) == (None, 2)
        return copy["weight"].values, copy["step"][0]

    places = [tensor.data_ptr() for tensor in copied()]
    value.add_(1)
    weight, step = copied()
    assert [weight.data_ptr(), step.data_ptr()] == places
    assert torch.equal(weight, torch.arange(1, 7, dtype=torch.float64).view(2, 3))
    assert value.data_ptr() not in places
    state["weight"] = whole_block(value.bfloat16())  # another type, which does not fit
    weight, step = copied()
    assert torch.equal(weight, value.bfloat16())
    assert step.data_ptr() == places[1]


def test_a_snapshot_with_a_damaged_part_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, 5):
        save_kept(tmp_path, step)
    newest, second, third, fourth = list_snapshots(tmp_path)
    part = parts_of(newest)[0] / "rank_3.bin"
    part.write_bytes(part.read_bytes()[:-1])
    part = parts_of(second)[0] / "rank_1.bin"
    flipped = bytearray(part.read_bytes())
    flipped[0] ^= 1
    part.write_bytes(flipped)
    (parts_of(third)[0] / "rank_2.bin").unlink()
    assert loaded(list_snapshots(tmp_path)) == (1, fourth)
    for said in ("rank_3.bin is cut off", "rank_1.bin does not match", "rank_2.bin is missing"):
        assert said in caplog.text
    fourth.write_bytes(b"")
    with pytest.raises(ConfigError, match="none of the 4 snapshots .* type that and resume=<another snapshot>"):
        load_first_good(list_snapshots(tmp_path))


def save_kept(folder: Path, step: int) -> None:
    """A snapshot beside which older ones stay."""
    save(folder / str(step), f"step_{step:08d}", step)
    for path in (folder / str(step)).iterdir():
        path.rename(folder / path.name)


def test_old_parts_are_deleted_with_their_snapshot(tmp_path: Path) -> None:
    for value in range(4):
        save(tmp_path, f"step_{value:08d}", value)
        save(tmp_path, "best", value)
    snapshots = [*list_snapshots(tmp_path), tmp_path / "best.pt"]
    assert [path.stem for path in snapshots] == ["step_00000003", "step_00000002", "best"]
    assert {parts for path in snapshots for parts in parts_of(path)} == set(tmp_path.glob("*.parts.*"))
    assert loaded([tmp_path / "best.pt"])[0] == 3


def test_parts_stay_while_their_snapshot_cannot_be_read(tmp_path: Path) -> None:
    save(tmp_path, "step_00000001", 1)
    path = tmp_path / "step_00000001.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    remove_leftovers(tmp_path)
    path.write_bytes(whole)
    assert loaded([path]) == (1, path)


@pytest.mark.parametrize("name", ["best", "step_{:08d}"], ids=["best", "numbered"])
def test_killed_at_any_moment_a_whole_snapshot_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    disk = Disk(monkeypatch)
    assert disk.save(partial(save, tmp_path, name.format(0), 0), last=1000)
    value, moments, finished = 0, 0, False
    while not finished:
        finished = disk.save(partial(save, tmp_path, name.format(value + 1), value + 1), last=moments)
        paths = list_snapshots(tmp_path) or [tmp_path / "best.pt"]
        now, path = loaded(paths)
        assert path == paths[0]  # nothing was passed over
        assert now in (value, value + 1), f"killed at file operation {moments}"
        assert now == value + 1 or not finished
        remove_leftovers(tmp_path)
        assert loaded(paths)[0] == now
        kept = [parts for snapshot in tmp_path.glob("*.pt") for parts in parts_of(snapshot)]
        assert sorted(kept) == sorted(tmp_path.glob("*.parts.*"))
        value, moments = now, moments + 1
    assert moments > 20  # four parts and a file were opened, written, synced and replaced
    assert "and passed over" not in caplog.text


def test_a_strangers_snapshot_names_no_file_elsewhere(tmp_path: Path) -> None:
    save(tmp_path / "run", "step_00000001", 1)
    path = tmp_path / "run" / "step_00000001.pt"
    contents = torch.load(path, weights_only=True)
    (tmp_path / "secret").write_bytes(bytes(28 * 8))
    contents["parts"]["files"] = {"../../secret": [28 * 8, "0"]}
    with pytest.raises(ValueError, match=r"its part .*/secret is missing"):
        open_parts(path, contents, check=False)
