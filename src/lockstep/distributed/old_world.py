# until issue 46
"""What packages that are not written anew yet still need of the world, beside `World`.

gather_state with snapshots (44) and modes (45).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.world import World

PLAIN = (bool, int, float, str, type(None))


def gather_state(world: World, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's `state` of CPU tensors and plain values, in dicts, lists, tuples and sets, on rank 0. Empty
    elsewhere.

    Numbers of other libraries become Python's, and other objects None.
    """
    tensors: list[Tensor] = []
    descriptions = world.all_gather_json(_describe(state, tensors))
    if not world.is_rank_zero:
        for tensor in filter(Tensor.numel, tensors):
            dist.send(_as_bytes(tensor.contiguous()), dst=0, group=world.control)
        return []
    states = [state]
    for rank, description in enumerate(descriptions[1:], start=1):
        received: list[Tensor] = []
        states.append(_rebuild(description, received))
        for tensor in filter(Tensor.numel, received):
            dist.recv(_as_bytes(tensor), src=rank, group=world.control)
    return states


def _describe(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """`value` for JSON. Its tensors are added to `tensors`, in their order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[key, _describe(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple | set | frozenset):
        return {type(value).__name__: [_describe(item, tensors) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value) in PLAIN:
        return {"value": value}
    return {"value": value.item() if hasattr(value, "item") else None}


def _rebuild(description: dict[str, Any], tensors: list[Tensor]) -> Any:
    """What was described, with empty tensors. They are added to `tensors`, in the order in which `_describe` did."""
    match description:
        case {"tensor": dtype, "shape": shape}:
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))
            return tensors[-1]
        case {"dict": items}:
            return {key: _rebuild(item, tensors) for key, item in items}
        case {"list": items}:
            return [_rebuild(item, tensors) for item in items]
        case {"tuple": items}:
            return tuple(_rebuild(item, tensors) for item in items)
        case {"set": items}:
            return {_rebuild(item, tensors) for item in items}
        case {"frozenset": items}:
            return frozenset(_rebuild(item, tensors) for item in items)
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"bytearray": text}:
            return bytearray.fromhex(text)
        case {"complex": numbers}:
            return complex(*numbers)
    return description["value"]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: gloo does not send every type of number."""
    return tensor.reshape(-1).view(torch.uint8)
