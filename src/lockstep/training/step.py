"""One optimizer step.

To write a step of your own: a class derived from `Step` with `__call__`, and `conf/step/<name>.yaml` with its
`_target_` and its keys, see docs/experiments.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.data.loader import Batch, Progress
from lockstep.strategies.base import Loss, Outputs, Strategy
from lockstep.tasks.base import Task
from lockstep.training.metrics import Meter
from lockstep.training.nonfinite import is_left_out
from lockstep.training.rng import Draws
from lockstep.training.schedules import Schedule


@dataclass(kw_only=True, eq=False)
class Step:
    """Forward, backward, averaging, clipping, update. A subclass passes on the keyword arguments that it does not take.
    scaler: of the loss, for fp16; else one that does nothing. ignores: whether some targets may count nowhere.
    progress: `progress.step` steps are done. average: as `lockstep.training.ema.Average`. skips: for watch.nan=skip."""

    strategy: Strategy
    task: Task
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler
    meter: Meter
    draws: Draws
    progress: Progress
    max_grad_norm: float | None = None
    average: Any = None
    skips: bool = False
    ignores: bool = True
    unit = 1  # after how many steps all ranks hold the same

    def __post_init__(self) -> None:
        self.scales = self.scaler.is_enabled()
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.has_own_zero_grad = type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        self.grad_norm: Tensor | None = None  # of the last step, before it was clipped
        self.targets_per_sample = 0  # where all targets count; 0 where it is not known
        self.buffers_before: list[tuple[Tensor, Tensor]] = []  # and their copies, where updates may be left out
        self.weights: dict[int, Tensor] = {}  # {samples of a batch: what multiplies the sum of the losses}
        self.pending: tuple[Any, Tensor, Tensor] | None = None  # (what waits for the counts, the weight)

    def __call__(self, batch: Batch) -> None:
        if self.has_own_zero_grad:
            self.optimizer.zero_grad()
        else:  # as torch's, which tells the profiler of each call
            for parameter in self.parameters:
                parameter.grad = None
        weight = self.begin(batch)
        for part in batch.parts:
            with self.draws.of_part(part, batch):
                self.strategy.forward_backward(part, self.loss, weight, part is batch.parts[-1])
        self.update()

    def forward_backward(self, batch: Batch, loss: Loss | None = None, outputs: Outputs | None = None) -> None:
        """For steps of your own: adds the gradient of the mean loss over the global batch to `.grad`, on all ranks.
        loss: (outputs, targets) -> the summed loss of these samples, 0-d, which is not measured: a sample counts once a
        step in the metrics. outputs: (model, inputs) -> what it takes. Both stand for those of the task."""
        weight = self.begin(batch)
        if loss is not None:
            self._fill_in()
        for part in batch.parts:
            with self.draws.of_part(part, batch):
                self.strategy.forward_backward(part, loss or self.loss, weight, part is batch.parts[-1], outputs)

    def begin(self, batch: Batch) -> Tensor:
        """0-d: what multiplies the sum of a part's losses before the backward pass, W / N. N is the count of the global
        batch, W what the averaging of gradients divides by: a mean of the ranks' means is wrong where their shares
        differ. Counts that ranks add up travel during the forward pass, and `loss` fills the weight in."""
        if self.skips:
            self.buffers_before = [(buffer, buffer.clone()) for buffer in self.strategy.model.buffers()]
        weight = self.weights.get(batch.count)
        if weight is None:
            device, dtype = self.strategy.world.device, self.strategy.loss_type
            # torch.tensor would wait for a GPU
            weight = torch.full((), self.strategy.gradient_divisor / batch.count, device=device, dtype=dtype)
            targets = batch.parts[0].targets if batch.parts else None
            if targets is not None and self.task.counts_by_value(targets, self.ignores):
                counts = torch.stack([self._count(part.targets) for part in batch.parts])
                self.pending = *self.strategy.sum_counts(counts), weight
                return weight
            self.weights[batch.count] = weight
            if isinstance(targets, Tensor) and len(targets):
                self.targets_per_sample = targets[0].numel()
        return self.scaler.scale(weight) if self.scales else weight

    def _count(self, targets: Any) -> Tensor:
        count, zero = self.task.count(targets), torch.zeros((), dtype=torch.float64, device=self.meter.device)
        return count.to(zero.device).double() if isinstance(count, Tensor) else zero + count

    def _fill_in(self) -> None:
        if self.pending is None:
            return
        (wait, counts, weight), self.pending = self.pending, None
        wait()
        total = counts.sum()
        value = self.strategy.gradient_divisor / total.where(total > 0, 1)  # of nothing, the loss is 0
        weight.copy_(self.scaler.scale(value.to(weight)) if self.scales else value)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The summed loss of a part, measured in the train metrics."""
        sums = self.task.sums(outputs, targets, self.ignores)
        if self.strategy.counts:
            self.meter.add(self.progress.step + 1, sums.values, sums.counts)
        if self.pending is not None:
            self._fill_in()
        return sums.loss

    def unmeasured_loss(self, outputs: Any, targets: Any) -> Tensor:
        """As `loss`, for a second pass."""
        return self.task.sums(outputs, targets, self.ignores).loss

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Unscale, clip, step, schedule and average, with the gradients in `.grad`. Schedule and average go with the
        run's optimizer, not with another one."""
        chosen = self.optimizer if optimizer is None else optimizer
        if self.scales:
            self.scaler.unscale_(chosen)
        if self.skips and is_left_out(self):
            self.meter.discard(self.progress.step + 1)
        else:
            if self.max_grad_norm is not None:
                self.grad_norm = self.strategy.clip_grad_norm(self.parameters, self.max_grad_norm)
            self.scaler.step(chosen) if self.scales else chosen.step()
            if self.average is not None and chosen is self.optimizer:
                self.average.update()
        if self.scales:
            self.scaler.update()
        if chosen is self.optimizer:
            self.schedule(self.progress.step + self.progress.ahead + 1)

    def synchronise(self) -> None:
        """At an epoch's end: bring what all ranks shall hold the same to all of them, where each step does not."""

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot keeps of this step, beside the run's own: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse, before the first step of a resumed run."""
