"""What happens to a step whose loss or gradient is NaN or infinite, and which samples broke it."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.compat import foreach_norm, non_finite_check_and_unscale
from lockstep.data.dataset import tensors_in
from lockstep.data.partition import Batch
from lockstep.errors import TrainingDiverged, first_of
from lockstep.strategies.base import Strategy
from lockstep.training.meter import LOSSES_KEPT, Meter

log = logging.getLogger(__name__)

ReadSamples = Callable[[Tensor, int], tuple[Tensor, Any, Any]]
"""(numbers of training samples (N,), epoch) -> (their numbers, inputs, targets), as `BatchLoader.read` gives them."""

SKIPS_IN_A_ROW = 10  # more of them mean that the weights are bad, not a batch
SMALLER_STEPS = "type optimizer.lr=<smaller> or trainer.max_grad_norm=1.0"
OTHER_DATA = "repair these samples or remove them from the data set"


class NanPolicy:
    """Looks at the averaged gradient of steps in which ranks agree on it, and finds the samples that broke it.

    A NaN on one rank is in the averaged gradient of all ranks, so each decides alone and all decide alike. On a GPU
    the norms are kept, and read with the next log: the host does not wait. `skip` needs them before the update, so
    there the host waits in each step.

    action: stop raises TrainingDiverged; skip leaves out the update.
    read: for messages; None: they name no broken samples.
    skipped: an attribute, updates left out so far.
    """

    def __init__(
        self, action: str, strategy: Strategy, meter: Meter, checks_gradients: bool, read: ReadSamples | None = None
    ) -> None:
        self.action, self.strategy, self.meter = action, strategy, meter
        self.checks_gradients = checks_gradients and strategy.ranks_agree
        self.reads_at_once = reads_at_once(strategy.world.device, action)
        self.read = read
        self.skipped = self.skipped_in_a_row = 0
        self.batches: deque[tuple[int, int, list[Tensor]]] = deque(maxlen=LOSSES_KEPT)  # (step, epoch, indices)
        self.norms: deque[tuple[int, Tensor]] = deque(maxlen=LOSSES_KEPT)  # (step, norm) on a GPU, not read yet
        self.buffers_before: dict[str, Tensor] = {}

    def begin(self, step: int, epoch: int, batch: Batch) -> None:
        """The forward pass of `step` is about to start."""
        self.batches.append((step, epoch, [part.indices for part in batch.parts]))
        if self.action == "skip":  # running statistics change in the forward pass
            self.buffers_before = {name: buffer.clone() for name, buffer in self.strategy.model.named_buffers()}

    def accepts(self, step: int, gradients: Sequence[Tensor]) -> bool:
        """Whether the update is to be taken. Call it after the gradients are averaged. `step`: this step's number.

        Raises TrainingDiverged, on all ranks, if gradients are not finite: with `skip` after ten such steps in a row;
        on a GPU without `skip` later, when the norms are read.
        """
        if not self.checks_gradients or not gradients:
            return True
        if not self.reads_at_once:
            self.norms.append((step, sum_of_norms(gradients)))
            return True
        if are_finite(gradients):
            self.skipped_in_a_row = 0
            return True
        what, advice = self._describe(step)
        self.skipped_in_a_row += 1
        if self.action != "skip":
            raise TrainingDiverged(what, advice)
        if self.skipped_in_a_row > SKIPS_IN_A_ROW:
            raise TrainingDiverged(f"{what}, as in the {SKIPS_IN_A_ROW} steps before", advice)
        self._skip(step, what)
        return False

    def require_finite(self, means: dict[str, float], last_step: int) -> dict[str, float]:
        """`means`, the same on all ranks. Raises TrainingDiverged if their loss is NaN or infinite."""
        if not math.isfinite(means["loss"]):
            raise self.non_finite_loss(means["loss"], last_step)
        return means

    def non_finite_loss(self, loss: float, last_step: int) -> TrainingDiverged:
        """The error for a mean loss that is not finite. A collective, called by all ranks with the same numbers."""
        steps = [step for step, norm in self.norms if not math.isfinite(norm.item())]
        found = self.meter.first_non_finite()
        step = min([*steps, *([] if found is None else [found])], default=None)
        if step is None:
            return TrainingDiverged(f"the loss is {loss} by step {last_step}", SMALLER_STEPS)
        return TrainingDiverged(*self._describe(step))

    def restore(self, skipped: int, in_a_row: int) -> None:
        """Go on from the numbers of updates that a snapshot's run had left out."""
        self.skipped, self.skipped_in_a_row = skipped, in_a_row

    @torch.no_grad()
    def _skip(self, step: int, what: str) -> None:
        self.meter.discard(step)
        for name, buffer in self.strategy.model.named_buffers():  # a model may have assigned another tensor
            if name in self.buffers_before and buffer.shape == self.buffers_before[name].shape:  # some grow
                buffer.copy_(self.buffers_before[name])
        self.skipped += 1
        log.warning("%s; the update of this step is left out", what)

    def _describe(self, step: int) -> tuple[str, str]:
        """(the loss of `step`, and which rank's samples broke it; what to do about it). A collective."""
        sums = [loss.item() for number, loss in self.meter.recent_losses if number == step]
        losses = [loss for loss in sums if not math.isfinite(loss)]
        batch = [(epoch, parts) for number, epoch, parts in self.batches if number == step][:1]
        samples = [(indices, epoch) for epoch, parts in batch for indices in parts]
        mine = {
            "loss": str(losses[0]) if losses else None,
            "samples": [index for indices, _ in samples for index in indices.tolist()],
            "broken": [
                found
                for indices, epoch in samples
                if self.read is not None
                for found in broken_samples(*self.read(indices, epoch))
            ],
        }
        everyone = self.strategy.world.all_gather_json(mine)
        advice = SMALLER_STEPS
        if any(found["broken"] for found in everyone):
            advice = OTHER_DATA
            if self.action == "stop" and self.strategy.ranks_agree:
                advice += ", or to leave out their batches type watch.nan=skip"
        return describe_batches(step, everyone), advice


def describe_batches(step: int, everyone: Sequence[dict[str, Any]]) -> str:
    """The first words of a message.

    everyone: of each rank its loss as text, if it is not finite, the samples of its batch, and those among them that
    hold a NaN. With synchronised batch norm these make the loss of all ranks NaN, so only their ranks count.
    """
    losses = {rank: found["loss"] for rank, found in enumerate(everyone) if found["loss"] is not None}
    broken = {rank: found["broken"] for rank, found in enumerate(everyone) if found["broken"]}
    what = f"the loss is {next(iter(losses.values()))}" if losses else "the gradient is not finite (the loss is)"
    ranks = broken or losses or range(len(everyone))
    batches = [
        f"on rank {rank} with the samples {first_of(everyone[rank]['samples'], SAMPLES_NAMED)}" for rank in ranks
    ]
    sentence = f"{what} at step {step} {' and '.join(batches)}"
    if broken:
        sentence += f"; {sentence_about(sample for found in broken.values() for sample in found)}"
    return sentence


def reads_at_once(device: torch.device, action: str) -> bool:
    """Whether the norm is read in its own step: on a CPU nothing waits for it, and `skip` has to know it."""
    return device.type == "cpu" or action == "skip"


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all values are. Reads them: on a GPU the host waits."""
    if tensors[0].device.type != "cpu":
        quick = math.isfinite(sum_of_norms(tensors).item())
        return quick or all(bool(tensor.isfinite().all()) for tensor in tensors)  # huge values overflow in a norm
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    values = [torch.view_as_real(value) if value.is_complex() else value for value in values]
    found, scale = torch.zeros((), dtype=torch.float32), torch.ones((), dtype=torch.float32)
    # GradScaler's check, which multiplies by the scale: one call takes half the time of a sum of each small tensor.
    non_finite_check_and_unscale(values, found, scale)
    return not found.item()


def sum_of_norms(tensors: Sequence[Tensor]) -> Tensor:
    """A 0-d tensor that is NaN or infinite if a value of `tensors` is, or if a square overflows."""
    device = tensors[0].device
    return torch.stack([norm.to(device) for norm in foreach_norm(tensors)]).sum()


SAMPLES_NAMED = 16  # in a sentence

Broken = tuple[int, str, str]
"""The number of a sample, "NaN" or "infinite values", and "inputs" or "targets"."""


def broken_samples(indices: Tensor, inputs: Any, targets: Any) -> list[Broken]:
    """Those of a batch. indices: the numbers of its samples (N,). Reads values: on a GPU the host waits.

    A tensor with other rows than samples, such as sequences that a collate_fn packs, names none.
    """
    found: list[Broken] = []
    for place, value in (("inputs", inputs), ("targets", targets)):
        for tensor in filter(torch.is_floating_point, tensors_in(value)):
            if tensor.shape[:1] != indices.shape:
                continue
            rows = tensor.reshape(len(tensor), -1) if len(tensor) else tensor[:, None]
            for kind, is_broken in (("NaN", rows.isnan().any(1)), ("infinite values", rows.isinf().any(1))):
                found += [(number, kind, place) for number in indices.to(tensor.device)[is_broken].tolist()]
    return found


def sentence_about(broken: Iterable[Sequence[Any]]) -> str:
    """ "sample 17 has NaN in its inputs". broken: one at least; a `Broken` that came as JSON is a list."""
    groups: dict[tuple[str, str], set[int]] = {}
    for number, kind, place in broken:
        groups.setdefault((kind, place), set()).add(number)
    words = []
    for (kind, place), numbers in groups.items():
        names = first_of(sorted(numbers), SAMPLES_NAMED)
        words.append(
            f"sample {names} has {kind} in its {place}"
            if len(numbers) == 1
            else f"the samples {names} have {kind} in their {place}"
        )
    return " and ".join(words)
