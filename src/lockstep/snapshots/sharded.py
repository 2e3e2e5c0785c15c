"""The tensors of which each rank has a part, as safetensors files of torch.distributed.checkpoint.

Of torch's only its storage is used: its collectives unpickle what other ranks send. Any number of ranks reads what it
needs, without the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lockstep.snapshots.files import require_safetensors

FILE_BYTES = 2**25  # of a file, at least: it is put together in memory
FILES = 16  # of a rank, about


@dataclass(frozen=True)
class Shard:
    """`values`, on the CPU, of a tensor of `shape`, in which their first element is at the index `offsets`."""

    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stored(self) -> "Shard":
        """As the files hold it: complex numbers as pairs of real ones."""
        if not self.values.is_complex():
            return self
        return Shard(torch.view_as_real(self.values), (*self.offsets, 0), (*self.shape, 2))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.shape)


def save_shards(shards: Mapping[str, Shard], folder: Path, rank: int) -> list[str]:
    """Write what this rank saves to files in `folder`, which other ranks write to as well. Returns their names.

    The shards of one tensor must not overlap. Raises OSError, for example on a full disk.
    """
    items, files, size = [], dict[str, int](), 0
    kept = {name: shard.stored for name, shard in shards.items()}
    of_file = max(FILE_BYTES, sum(shard.values.nbytes for shard in kept.values()) // FILES)
    for name, shard in kept.items():
        data = TensorWriteData(shard.chunk, TensorProperties(shard.values.dtype), torch.Size(shard.shape))
        items.append(WriteItem(MetadataIndex(name, shard.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        files[name], size = 1 + size // of_file, size + shard.values.nbytes
    if not items:
        return []
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    plan = SavePlan(items, storage_data={"fqn_to_index_mapping": files, "shard_index": rank + 1})
    results = writer.write_data(writer.prepare_local_plan(plan), _Saved(kept)).wait()
    return sorted({result.storage_data.relative_path for result in results})


def load_shards(folder: Path, wanted: Mapping[str, Shard]) -> None:
    """Read the values of `wanted` from the files in `folder`, in place. Nothing else is read.

    Raises OSError, and ValueError if the files do not hold all of it.
    """
    require_safetensors(f"{folder}, which holds tensors in parts,")
    reader, items = HuggingFaceStorageReader(str(folder)), list[ReadItem]()
    metadata = reader.read_metadata()
    kept = {name: shard.stored for name, shard in wanted.items() if shard.values.numel()}
    for name, shard in kept.items():
        there: Any = metadata.state_dict_metadata.get(name)
        found = [] if there is None else create_read_items_for_chunk_list(name, there, [shard.chunk])
        numbers = sum(torch.Size(item.lengths).numel() for item in found)
        if numbers != shard.values.numel():
            raise ValueError(f"{numbers} of {shard.values.numel()} numbers of {name} are there")
        items += found
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    with torch.device("cpu"):  # what is read follows the default, which may be meta
        reader.read_data(LoadPlan(items), _Loaded(kept)).wait()


class _Saved(DefaultSavePlanner):
    """Gives the writer the values of each item."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        super().__init__()
        self.shards = shards

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.shards[write_item.index.fqn].values


class _Loaded(DefaultLoadPlanner):
    """Gives the reader the place of each item."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        super().__init__()
        self.shards = shards

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        values = self.shards[read_item.dest_index.fqn].values
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is in its place."""
