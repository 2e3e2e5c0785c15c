"""Tensors as bytes: many in one message, what a rank saves and reads of one on a disk, large ones in mapped files."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

# What all backends can send, unlike float8, int16 and unsigned types.
TYPES_SENT = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
TYPES_SENT |= {torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool}
LARGE = 2**25  # bytes, from which a tensor is moved to a mapped file


def map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], nested: Any) -> Any:
    """`nested`, in dicts, lists and tuples, with function(value) in place of each value of `kind`."""
    if isinstance(nested, kind):
        return function(nested)
    if isinstance(nested, dict):
        return {key: map_only(kind, function, value) for key, value in nested.items()}
    if isinstance(nested, list | tuple):
        return type(nested)([map_only(kind, function, value) for value in nested])
    return nested


# In a message. Several types go in one vector without rounding.


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all `tensors`, one tensor behind the other: (n,) uint8. Sparse ones as dense."""
    dense = [tensor.detach().to_dense().to(tensors[0].device) for tensor in tensors]
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in dense])


@torch.no_grad()
def from_bytes(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """The reverse of `to_bytes`: copy the values into `tensors`, in place."""
    parts = packed.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        aligned = part.clone()  # torch cannot read an int64 that begins at any byte
        values = aligned.view(tensor.dtype).view(tensor.shape)
        tensor.copy_(values.to_sparse(layout=tensor.layout) if tensor.layout != torch.strided else values)


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Copy rank 0's `tensors` to every rank. They may have any type and layout: gloo knows few types, takes memory as
    contiguous, and no backend knows sparse ones."""
    if tensors:
        packed = to_bytes(tensors)
        dist.broadcast(packed, src=0)
        from_bytes(packed, tensors)


def as_saved(tensor: Tensor) -> Tensor:
    """`tensor` as files of weights hold it: on the CPU and, if it is dense, contiguous."""
    return tensor.cpu().contiguous() if tensor.layout == torch.strided else tensor.cpu()


def as_bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor, as a numpy array of bytes: numpy has no bfloat16."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


# On the disk, in blocks.


@dataclass(frozen=True)
class Block:
    """What this rank saves of a tensor of `shape`: `values`, whose first element is at index `offsets` of the tensor.

    values: None if other ranks save all of it.
    """

    values: Tensor | None
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return 0 if self.values is None else self.values.nbytes


@dataclass(frozen=True)
class FileBlock:
    """A block of `shape` of a tensor, row by row in `file` from byte `position` on. `offsets`: as in `Block`."""

    file: Path
    position: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor:
    """A tensor on the disk. Nothing is read before it is asked for."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, blocks: Sequence[FileBlock]) -> None:
        self.shape, self.dtype, self.blocks = torch.Size(shape), dtype, blocks

    def whole(self) -> Tensor:
        """All of it, on the CPU. Raises as `read` does."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The elements from index `offsets` on, of `shape`, on the CPU.

        Raises OSError for a file that is missing, and ValueError if the blocks do not hold all of it.
        """
        values = torch.empty(tuple(shape), dtype=self.dtype, device="cpu")
        found = sum(_copy(block, values, offsets) for block in self.blocks)
        if found != values.numel():
            raise ValueError(f"{found} of {values.numel()} numbers of a tensor are there")
        return values


def whole(named: Any) -> Any:
    """`named`, nested, with each StoredTensor read as a whole."""
    return map_only(StoredTensor, StoredTensor.whole, named)


def whole_block(tensor: Tensor) -> Block:
    """`tensor`, saved as a whole by this rank; a sparse one as dense."""
    tensor = tensor.to_dense()
    return Block(tensor, (0,) * tensor.dim(), tuple(tensor.shape), tensor.dtype)


def _copy(block: FileBlock, values: Tensor, offsets: Sequence[int]) -> int:
    """Copy what `block` has of `values`, which begin at `offsets`. Returns how many numbers these are."""
    starts = [max(pair) for pair in zip(block.offsets, offsets, strict=True)]
    of_block = [begin + length for begin, length in zip(block.offsets, block.shape, strict=True)]
    ends = [min(end, begin + length) for end, begin, length in zip(of_block, offsets, values.shape, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return 0

    def places(origin: Sequence[int]) -> tuple[slice, ...]:
        return tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, origin, strict=True))

    inside = places(block.offsets)
    rows = _read_rows(block, inside[0] if inside else slice(0, 1), values.dtype)
    target = values[places(offsets)]
    target.copy_(rows[(slice(None), *inside[1:])] if inside else rows[0])
    return target.numel()


def _read_rows(block: FileBlock, rows: slice, dtype: torch.dtype) -> Tensor:
    """Rows of a block, which follow each other in its file. A block of no dimension has one."""
    shape = (rows.stop - rows.start, *block.shape[1:])
    buffer = torch.empty(shape, dtype=dtype, device="cpu")
    row_bytes = prod(block.shape[1:]) * dtype.itemsize
    with open(block.file, "rb") as file:
        file.seek(block.position + rows.start * row_bytes)
        length = file.readinto(as_bytes(buffer))
    if length != buffer.nbytes:
        raise ValueError(f"{block.file.name} is cut off")
    return buffer


# In mapped files: where memory is short, the kernel moves them to the disk.


def on_disk(tensor: Tensor) -> Tensor:
    """A copy of a large CPU tensor in a file, which is gone when the copy is. Other tensors as they are.

    So are all if there is no room in the folder for temporary files, which TMPDIR names.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < LARGE:
        return tensor
    try:
        with tempfile.NamedTemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # later a full disk would kill the process
            mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except OSError:
        return tensor
    return mapped.view(tensor.shape).copy_(tensor)


@contextmanager
def parameters_on_disk() -> Iterator[None]:
    """Inside the block a large parameter is moved to the disk as soon as a module gets it, before it is initialised.

    A model larger than the memory can be built so, with the numbers of any other. It is for models that are cut soon:
    a step on such parameters would write them to the disk.
    """
    handle = register_module_parameter_registration_hook(_move)
    try:
        yield
    finally:
        handle.remove()


def _move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None and not is_lazy(parameter) and parameter.untyped_storage().filename is None:
        parameter.data = on_disk(parameter.data)
