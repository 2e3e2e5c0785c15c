"""The tensors of which each rank has a part, in safetensors files such as torch.distributed.checkpoint writes.

Its own description of a checkpoint is a pickle, and its collectives unpickle what other ranks send. Here each rank
writes its own files, and any number of ranks reads what it needs, without the others.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lockstep.files import write_whole

FILE_BYTES = 2**25  # of a file, at least: it is put together in memory
FILES = 16  # of a rank, at most

Part = tuple[Tensor, tuple[int, ...]]  # (a part of a tensor, where it begins in the whole)
Shards = dict[str, Part]  # {name of a tensor: this rank's part of it, contiguous on the CPU}


def save_shards(shards: Shards, folder: Path, rank: int) -> list[str]:
    """Write this rank's parts, which must not overlap with those of others, to files in `folder`. Returns their names.
    Raises OSError."""
    stored = [(name, *_real(part)) for name, part in shards.items()]
    count = min(FILES, sum(part.nbytes for _, part, _ in stored) // FILE_BYTES + 1, len(stored))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"shard-{rank + 1:05d}-model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        places = {key: {"saved_offsets": offsets} for key, _, offsets in stored[number::count]}
        header = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        write_whole(folder / name, save({key: part for key, part, _ in stored[number::count]}, header))
    return names


def load_shards(folder: Path, wanted: Mapping[str, Part]) -> None:
    """Read the values of the tensors in `wanted`, on any device, from the files in `folder`, in place. Nothing else is
    read. Raises ValueError if one is not there, or not all of it."""
    parts = {name: _real(part) for name, part in wanted.items()}
    missing = {name: part.numel() for name, (part, _) in parts.items()}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in places.keys() & parts.keys():
                (part, begins), firsts, stored = parts[name], places[name]["saved_offsets"], file.get_slice(name)
                of_each = zip(begins, part.shape, firsts, stored.get_shape(), strict=True)
                both = [(max(begin, first), min(begin + size, first + count)) for begin, size, first, count in of_each]
                if all(low < high for low, high in both):
                    ours, theirs = (
                        tuple(slice(low - start, high - start) for (low, high), start in zip(both, starts, strict=True))
                        for starts in (begins, firsts)
                    )
                    missing[name] -= part[ours].copy_(stored[theirs]).numel()
    if lost := [name for name, count in missing.items() if count]:
        raise ValueError(f"{folder} has not all of {lost[0]}")


def _real(part: Part) -> Part:
    """Complex numbers as pairs of real ones, which is how the files hold them."""
    return (torch.view_as_real(part[0]), (*part[1], 0)) if part[0].is_complex() else part
