"""The state of a model whose parameters are DTensors: gathered for a snapshot, and cut again."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from lockstep.distributed.world import World


def gather_full(named: dict[str, Any], world: World) -> dict[str, Any]:
    """`Strategy.full_state`: each DTensor in `named` becomes the whole tensor on rank 0, None elsewhere."""

    def gathered(tensor: DTensor) -> Tensor | None:
        full = tensor.full_tensor()  # a collective
        return full.cpu() if world.is_rank_zero else None

    result: dict[str, Any] = tree_map_only(DTensor, gathered, named)
    return result


def cut_like_parameters(named: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """`Strategy.shard_state`: {parameter name: nested whole tensors}, those of a parameter's shape cut as it is cut."""
    parameters = dict(model.named_parameters())
    return {name: _cut_like(parameters.get(name), values) for name, values in named.items()}


def _cut_like(parameter: nn.Parameter | None, values: Any) -> Any:
    if not isinstance(parameter, DTensor):
        return values

    def cut(tensor: Tensor) -> Tensor:
        if tensor.shape != parameter.shape:  # a step count
            return tensor
        whole = tensor.contiguous().to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)

    return tree_map_only(Tensor, cut, values)
