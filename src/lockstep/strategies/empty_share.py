"""The forward pass of a rank whose share of a batch has no samples, such as of an epoch's last batch of one sample."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lockstep.data.nested import map_tensors, tensors_in
from lockstep.distributed.sync_batch_norm import SyncBatchNorm

ROWS = 2  # batch norm refuses one


def forward(module: nn.Module, inputs: Any) -> Any:
    """`module(inputs)`, also for inputs without samples.

    Many models cannot compute those: `view(len(x), -1)` has no answer for a tensor without elements. So two samples of
    ones stand in for them, and their outputs are cut off. Their gradient is zero, and synchronised batch norm does not
    count them. torch's own, on GPUs, would, and can compute inputs without samples.
    """
    has_samples = all(len(tensor) for tensor in tensors_in(inputs))
    if has_samples or any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        return module(inputs)
    with _left_out_of_batch_norm(module):
        outputs = module(map_tensors(_stand_in, inputs))
    return map_tensors(lambda tensor: tensor[:0], outputs)


def _stand_in(inputs: Tensor) -> Tensor:
    """(0, ...) -> (2, ...): ones are token numbers, masks and pixels that any model takes."""
    return inputs.new_ones(ROWS, *inputs.shape[1:])


@contextmanager
def _left_out_of_batch_norm(module: nn.Module) -> Iterator[None]:
    norms = [part for part in module.modules() if isinstance(part, SyncBatchNorm)]
    for norm in norms:
        norm.counts_inputs = False
    try:
        yield
    finally:
        for norm in norms:
            norm.counts_inputs = True
