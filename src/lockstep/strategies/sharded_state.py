"""The state of a model whose parameters are DTensors: gathered or in parts for a snapshot, and cut again."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lockstep.compat import shape_and_offsets_of_part
from lockstep.distributed.world import World
from lockstep.strategies.tensor_bytes import TYPES_SENT, Block, StoredTensor, map_only, on_disk, whole_block


def gather_full(named: dict[str, Any], world: World) -> dict[str, Any]:
    """`Strategy.full_state`: each DTensor in `named` becomes the whole tensor on rank 0, None elsewhere.

    All large ones together may need more memory than rank 0 has.
    """

    def gathered(tensor: DTensor) -> Tensor | None:
        dtype, sent = tensor.dtype, tensor.dtype
        if dtype not in TYPES_SENT:  # gloo knows few types: it travels in one that holds it
            sent = torch.float32 if dtype.is_floating_point else torch.int32
        wide: Any = tensor.to(sent)
        full: Tensor = wide.full_tensor().to(dtype)
        return on_disk(full.cpu()) if world.is_rank_zero else None

    result: dict[str, Any] = map_only(DTensor, gathered, named)
    return result


def own_blocks(named: dict[str, Any], world: World, is_first_replica: bool = True) -> dict[str, Any]:
    """`Strategy.own_blocks`: each rank saves its part of a DTensor, and rank 0 the other tensors.

    is_first_replica: False on a rank whose parts another rank saves. Ranks that hold the same part in one mesh are
    told apart here.
    """

    def block(tensor: Tensor) -> Block:
        if not isinstance(tensor, DTensor):
            return whole_block(tensor) if world.is_rank_zero else replace(whole_block(tensor), values=None)
        mesh, placements = tensor.device_mesh, tensor.placements
        copies = [mesh.get_local_rank(dim) for dim, placed in enumerate(placements) if isinstance(placed, Replicate)]
        _, offsets = shape_and_offsets_of_part(tensor)
        values = tensor.to_local() if is_first_replica and not any(copies) else None
        return Block(values, tuple(offsets), tuple(tensor.shape), tensor.dtype)

    result: dict[str, Any] = map_only(Tensor, block, named)
    return result


def cut_like_parameters(named: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """`Strategy.shard_state`: {parameter name: nested whole tensors}, those of a parameter's shape cut as it is cut.

    Of a StoredTensor only this rank's part is read.
    """

    def cut(parameter: DTensor, tensor: Tensor | StoredTensor) -> Tensor | StoredTensor:
        if tensor.shape != parameter.shape:  # a step count
            return tensor
        mesh, placements = parameter.device_mesh, parameter.placements
        if isinstance(tensor, Tensor):
            whole = tensor.contiguous().to(parameter.device)
            return distribute_tensor(whole, mesh, placements, src_data_rank=None)
        shape, offsets = shape_and_offsets_of_part(parameter)
        local = tensor.read(offsets, shape).to(parameter.device)
        stride = parameter.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)

    found = dict(named)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in named and isinstance(parameter, DTensor):
            found[name] = map_only((Tensor, StoredTensor), partial(cut, parameter), named[name])
    return found
