"""What happens to a loss or a gradient that is NaN or infinite, and which samples broke it."""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from lockstep.data.source import tensors_in
from lockstep.errors import TrainingDiverged, first_of
from lockstep.strategies.base import local_part
from lockstep.training.run import Run

if TYPE_CHECKING:
    from lockstep.training.step import Step

log = logging.getLogger(__name__)

SKIPS_IN_A_ROW = 10  # more of them mean that the weights are bad, not a batch
SMALLER_STEPS = "type optimizer.lr=<smaller> or trainer.max_grad_norm=1.0"
OTHER_DATA = "repair or remove what is broken there, or to leave out such batches type watch.nan=skip"


@torch.no_grad()
def is_left_out(step: "Step") -> bool:
    """watch.nan=skip: whether the update of this step is left out, whose gradient is not finite on some rank. Then the
    buffers are what they were before it. The host waits in each step. Raises TrainingDiverged, on all ranks, after ten
    such steps in a row."""
    strategy, progress = step.strategy, step.progress
    bad = not are_finite([parameter.grad for parameter in step.parameters if parameter.grad is not None])
    if not strategy.replicas_equal:  # ranks hold other parts
        (bad,) = strategy.world.any_of([bad])
    if not bad:
        progress.skipped_in_a_row = 0
        return False
    progress.skipped, progress.skipped_in_a_row = progress.skipped + 1, progress.skipped_in_a_row + 1
    what = f"the gradient is not finite at step {progress.step + 1}"
    if progress.skipped_in_a_row > SKIPS_IN_A_ROW:
        raise TrainingDiverged(f"{what}, as in the {SKIPS_IN_A_ROW} steps before", SMALLER_STEPS)
    for buffer, copy in step.buffers_before:
        if buffer.shape == copy.shape:  # some grow
            buffer.copy_(copy)
    log.warning("%s; the update of this step is left out", what)
    return True


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all values are. Reads them: on a GPU the host waits. Huge values overflow in a norm."""
    local = [tensor.coalesce().values() if tensor.is_sparse else local_part(tensor) for tensor in tensors]
    return math.isfinite(get_total_norm(local).item()) or all(bool(tensor.isfinite().all()) for tensor in local)


def require_finite(run: Run, loss: float) -> None:
    """Raise TrainingDiverged, on all ranks, if the loss of the last steps is not finite, with the samples that broke it
    and their step, if that is known. loss: over all ranks."""
    if math.isfinite(loss):
        return
    what, step, loader, progress = f"the loss is {loss}", run.meter.first_non_finite(), run.loaders.train, run.progress
    if step is None:
        raise TrainingDiverged(what, SMALLER_STEPS)
    back = progress.step - step + 1  # batches, all of this epoch
    start = max(0, -(-progress.samples // loader.batch_size) - back) * loader.batch_size
    mine = list[int]()
    for request in loader.requests_at(progress.epoch, start):
        mine += broken_samples(loader.reader.whole(request.numbers), *loader.read(request))
    broken = sorted({number for of_rank in run.world.all_gather_json(mine) for number in of_rank})
    if not broken:
        raise TrainingDiverged(f"{what} at step {step}", SMALLER_STEPS)
    what += f" at step {step}; NaN or infinite values are in sample {first_of(broken, 16)}"
    raise TrainingDiverged(what, OTHER_DATA)


def broken_samples(numbers: Any, inputs: Any, targets: Any) -> list[int]:
    """Those of the samples `numbers` (N,) with NaN or infinite values. A tensor with other rows than samples, such as
    sequences that a collate_fn packs, names none."""
    found = list[int]()
    for tensor in filter(torch.is_floating_point, [*tensors_in(inputs), *tensors_in(targets)]):
        if tensor.shape[:1] == numbers.shape:
            is_broken = ~tensor.isfinite().reshape(len(tensor), tensor.shape[1:].numel()).all(1)
            found += numbers[is_broken.cpu().numpy()].tolist()
    return sorted(set(found))
