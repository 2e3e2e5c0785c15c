"""The tensors of which each rank has a part, in safetensors files of the form of torch.distributed.checkpoint.

Its HuggingFaceStorageReader reads them. Its own description of a checkpoint is a pickle, and its collectives unpickle
what other ranks send; here any number of ranks reads what it needs, without the others.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.files import write_whole
from lockstep.snapshots.files import require_safetensors

FILE_BYTES = 2**25  # of a file, at least: it is put together in memory
FILES = 16  # of a rank, about
PLACES = "DCP_SHARDING_INFO"  # in a file's header, {name: where in the whole tensor its part begins}


@dataclass(frozen=True)
class Shard:
    """`values` of a tensor of `shape`, in which their first element is at the index `offsets`."""

    values: Tensor
    offsets: tuple[int, ...]

    @property
    def stored(self) -> "Shard":
        """As the files hold it: complex numbers as pairs of real ones."""
        return Shard(torch.view_as_real(self.values), (*self.offsets, 0)) if self.values.is_complex() else self


def save_shards(shards: Mapping[str, Shard], folder: Path, rank: int) -> list[str]:
    """Write this rank's parts, contiguous ones on the CPU, to files in `folder`, where other ranks write theirs, which
    must not overlap with these. Returns their names. Raises OSError, for example on a full disk.
    """
    from safetensors.torch import save

    of_file, size = max(FILE_BYTES, sum(shard.values.nbytes for shard in shards.values()) // FILES), 0
    groups: list[dict[str, Shard]] = []
    for name, shard in shards.items():
        if not groups or size >= of_file:
            groups.append({})
            size = 0
        groups[-1][name], size = shard.stored, size + shard.values.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    names = [
        f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))
    ]
    for name, group in zip(names, groups, strict=True):
        places = {key: {"saved_offsets": shard.offsets} for key, shard in group.items()}
        header = {"DCP_VERSION": "1.0", PLACES: json.dumps(places)}
        write_whole(folder / name, save({key: shard.values for key, shard in group.items()}, header))
    return names


def load_shards(folder: Path, wanted: Mapping[str, Shard]) -> None:
    """Read the values of `wanted` from the files in `folder`, in place. Nothing else is read.

    Raises OSError, and ValueError if the files do not hold all of it.
    """
    require_safetensors(f"{folder}, which holds tensors in parts,")
    from safetensors import safe_open

    kept = {name: shard.stored for name, shard in wanted.items()}
    missing = {name: shard.values.numel() for name, shard in kept.items()}
    for path in folder.glob("*.safetensors"):
        with torch.device("cpu"), safe_open(path, framework="pt") as file:  # the default may be meta
            places = json.loads(file.metadata()[PLACES])
            for name in kept.keys() & places.keys():
                part, here, there = file.get_slice(name), kept[name], places[name]["saved_offsets"]
                ranges = [
                    (max(ours, theirs), min(ours + length, theirs + saved))
                    for ours, length, theirs, saved in zip(
                        here.offsets, here.values.shape, there, part.get_shape(), strict=True
                    )
                ]
                if all(begin < end for begin, end in ranges):
                    source = tuple(slice(b - at, e - at) for (b, e), at in zip(ranges, there, strict=True))
                    target = tuple(slice(b - at, e - at) for (b, e), at in zip(ranges, here.offsets, strict=True))
                    here.values[target] = part[source].to(here.values.device)
                    missing[name] -= here.values[target].numel()
    for name, numbers in missing.items():
        if numbers:
            raise ValueError(f"{numbers} of {wanted[name].values.numel()} numbers of {name} are not there")
