"""The state of a model whose parameters are DTensors: gathered or in parts for a snapshot, and cut again."""

from dataclasses import replace
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
        full = _full(tensor)
        return on_disk(full.cpu()) if world.is_rank_zero else None

    result: dict[str, Any] = map_only(DTensor, gathered, named)
    return result


def _full(tensor: DTensor) -> Tensor:
    """The whole tensor on every rank. A collective. gloo knows few types, so others travel in one that holds them."""
    dtype = tensor.dtype
    if dtype in TYPES_SENT:
        return tensor.full_tensor()
    wide: Any = tensor.to(torch.float32 if dtype.is_floating_point else torch.int32)
    full: Tensor = wide.full_tensor().to(dtype)
    return full


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
        _, offsets = shape_and_offsets_of_part(tensor.shape, mesh, placements)
        values = tensor.to_local() if is_first_replica and not any(copies) else None
        return Block(values, tuple(offsets), tuple(tensor.shape), tensor.dtype)

    result: dict[str, Any] = map_only(Tensor, block, named)
    return result


def cut_like_parameters(named: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """`Strategy.shard_state`: {parameter name: nested whole tensors}, those of a parameter's shape cut as it is cut.

    Of a StoredTensor only this rank's part is read.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: _cut_like(parameters.get(name), values) for name, values in named.items()}


def _cut_like(parameter: nn.Parameter | None, values: Any) -> Any:
    if not isinstance(parameter, DTensor):
        return values

    def cut(tensor: Tensor | StoredTensor) -> Tensor | StoredTensor:
        if tensor.shape != parameter.shape:  # a step count
            return tensor
        if isinstance(tensor, StoredTensor):
            return _read_part(parameter, tensor)
        whole = tensor.contiguous().to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)

    return map_only((Tensor, StoredTensor), cut, values)


def _read_part(parameter: DTensor, tensor: StoredTensor) -> DTensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offsets = shape_and_offsets_of_part(parameter.shape, mesh, placements)
    local = tensor.read(offsets, shape).to(parameter.device)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
