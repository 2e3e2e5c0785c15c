"""The tensors of which each rank has a part, in safetensors files that torch.distributed.checkpoint reads.

Its own description of a checkpoint is a pickle, and its collectives unpickle what other ranks send. Here each rank
writes its own files, and any number of ranks reads what it needs, without the others.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.files import write_whole

FILE_BYTES = 2**25  # of a file, at least: it is put together in memory
FILES = 16  # of a rank, at most

Shards = dict[str, tuple[Tensor, tuple[int, ...]]]
"""{name of a tensor: (this rank's part of it, contiguous on the CPU, and where it begins in the whole)}."""


def save_shards(shards: Shards, folder: Path, rank: int) -> list[str]:
    """Write this rank's parts to files in `folder`, where other ranks write theirs, which must not overlap with these.

    Returns their names. Raises OSError, for example on a full disk.
    """
    from safetensors.torch import save

    stored = [
        (name, torch.view_as_real(part), (*offsets, 0)) if part.is_complex() else (name, part, offsets)
        for name, (part, offsets) in shards.items()
    ]
    count = min(FILES, sum(part.nbytes for _, part, _ in stored) // FILE_BYTES + 1, len(stored))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"shard-{rank + 1:05d}-model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        places = {key: {"saved_offsets": offsets} for key, _, offsets in stored[number::count]}
        header = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        write_whole(folder / name, save({key: part for key, part, _ in stored[number::count]}, header))
    return names


def load_shards(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    """Read the values of `wanted`, whole tensors and DTensors, from the files in `folder`, in place. Nothing else is
    read. The files must have been verified: torch does not notice that one is missing. Raises ValueError."""
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {name: _real(tensor) for name, tensor in wanted.items()}
    try:
        with torch.device("cpu"), warnings.catch_warnings(action="ignore"):  # the default may be meta; of no_dist
            dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    except dcp.CheckpointException as error:  # a BaseException
        raise ValueError(str(error)) from error


def _real(tensor: Tensor) -> Tensor:
    """A view of complex numbers as pairs of real ones, which is how the files hold them."""
    if not tensor.is_complex():
        return tensor
    if not isinstance(tensor, DTensor):
        return torch.view_as_real(tensor)
    strides = (*(2 * stride for stride in tensor.stride()), 1)
    layout = tensor.device_mesh, tensor.placements
    shape = torch.Size((*tensor.shape, 2))
    return DTensor.from_local(torch.view_as_real(tensor.to_local()), *layout, shape=shape, stride=strides)
