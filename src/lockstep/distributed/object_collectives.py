"""Values and nested state between ranks, as JSON and tensors. Nothing that a rank receives can run code: no pickle."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PLAIN = (bool, int, float, str, type(None))


def all_gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's `value`, in the order of ranks, on every rank. A tuple comes back as a list."""
    mine = _encoded(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = int(max(lengths))
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    dist.all_gather(texts, padded, group=group)
    return [_decoded(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup, source: int = 0) -> Any:
    """The `value` of rank `source`, on every rank. A tuple comes back as a list."""
    is_source = dist.get_rank(group) == source
    text = _encoded(value) if is_source else torch.zeros(0, dtype=torch.uint8)
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=source, group=group)
    if not is_source:
        text = torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(text, src=source, group=group)
    return _decoded(text)


def gather_state(state: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Every rank's `state` (dicts, lists, tuples, CPU tensors, plain values), on rank 0. Empty on the other ranks.

    Numbers of other libraries become Python's, and other objects None.
    """
    tensors: list[Tensor] = []
    descriptions = all_gather_json(_describe(state, tensors), group)
    if dist.get_rank(group) == 0:
        return [state, *(_receive(descriptions[rank], rank, group) for rank in range(1, len(descriptions)))]
    for tensor in tensors:
        if tensor.numel():
            dist.send(_as_bytes(tensor.contiguous()), dst=0, group=group)
    return []


def broadcast_state(state: dict[str, Any], source: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """The `state` of rank `source`, on every rank. What it may hold: see `gather_state`."""
    tensors: list[Tensor] = []
    is_source = dist.get_rank(group) == source
    description = broadcast_json(_describe(state, tensors) if is_source else None, group, source)
    if not is_source:
        state = _rebuild(description, tensors)
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(_as_bytes(tensor.contiguous()), src=source, group=group)
    return state


def _receive(description: dict[str, Any], source: int, group: dist.ProcessGroup) -> Any:
    """What rank `source` has described and sends."""
    tensors: list[Tensor] = []
    state = _rebuild(description, tensors)
    for tensor in tensors:
        if tensor.numel():
            dist.recv(_as_bytes(tensor), src=source, group=group)
    return state


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def _describe(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """`value` for JSON. Its tensors are added to `tensors`, in their order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[key, _describe(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_describe(item, tensors) for item in value]}
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
    return description["value"]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: gloo does not send every type of number."""
    return tensor.reshape(-1).view(torch.uint8)
