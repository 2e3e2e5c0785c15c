# until issue 44
"""What snapshots want of a strategy until they are written anew: whole or sharded state by the names of the model."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.distributed.sync_batch_norm import SyncBatchNorm
from lockstep.strategies.tensor_bytes import broadcast

if TYPE_CHECKING:
    from lockstep.distributed.world import World


class OldState:
    """The state of a model that is whole on every rank."""

    model: nn.Module
    world: "World"
    ranks_per_model: int
    replicas_equal: bool

    shards_state = False
    """Whether the ranks can save the state in parts: see `own_blocks`."""

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to every rank: running statistics differ between ranks with sync_bn=off.

        A buffer that has another shape here, as one that grows may have, takes that of rank 0.
        """
        if self.world.size == 1:
            return
        mine = {name: list(buffer.shape) for name, buffer in self.model.named_buffers()}
        shapes = self.world.broadcast_json(mine)
        for name, shape in shapes.items():
            if mine.get(name) != shape:
                owner, _, last = name.rpartition(".")
                module = self.model.get_submodule(owner)
                setattr(module, last, getattr(module, last).new_empty(shape))
        broadcast([self.model.get_buffer(name) for name in shapes])

    def replicated_tensors(self) -> dict[str, Tensor]:
        """{name: parameter or buffer} that has the same bits on several ranks after every step. A damaged one is found.

        These are all ranks, or those `ranks_per_model` apart. Buffers: those of synchronised batch norms.
        """
        if not (self.replicas_equal or 1 < self.ranks_per_model < self.world.size):
            return {}
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        for name, module in self.model.named_modules():
            if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
                tensors.update(module.named_buffers(prefix=name, recurse=False))
        return tensors

    def full_state(self, named: dict[str, Any]) -> dict[str, Any]:
        """{parameter or buffer name: nested tensors}, as this rank holds them -> the whole model's, on rank 0.

        Every rank calls this. The values may be nested: a parameter's optimizer state is a dict of tensors.
        """
        return named

    def shard_state(self, named: dict[str, Any]) -> dict[str, Any]:
        """The reverse of `full_state`, called by every rank with the whole state: this rank's part of it.

        Of a sharded snapshot the values are StoredTensors. Those of this rank's part that stay so are read as a whole.
        """
        return named

    def own_blocks(self, named: dict[str, Any]) -> dict[str, Any]:
        """As `full_state`, but each tensor becomes the `Block` that this rank saves. With `shards_state`.

        The ranks save all of each tensor together, and nothing twice.
        """
        raise NotImplementedError
