"""One optimizer step: the gradient of a global batch, and the update."""

import warnings
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lockstep.data.loader import BatchLoader
from lockstep.data.partition import Batch, Part, fold_in
from lockstep.failures import rank as monitor
from lockstep.training.first_batch import require_one_tensor, require_plain_inputs, require_sums
from lockstep.training.setup import autocast
from lockstep.training.state import TrainState
from lockstep.training.timing import StepTimer


class TrainStepRunner:
    """The steps of one epoch, in the halves that a strategy puts together (`lockstep.strategies.base.StepRunner`)."""

    def __init__(self, state: TrainState, loader: BatchLoader, timer: StepTimer) -> None:
        self.state, self.loader, self.timer = state, loader, timer
        self.autocast = autocast(state.strategy.world.device, state.settings.precision)
        self.scales_loss = state.scaler.is_enabled()
        state.nan.read = partial(loader.read, epoch=state.progress.epoch)
        if state.gradients is not None and self.steps_left > 0:
            state.gradients = {}  # those of the epoch before are not shown if the last update of this one is left out

    @property
    def batch_size(self) -> int:
        return self.state.settings.batch_size

    @property
    def samples_left(self) -> int:
        return len(self.loader) - self.state.progress.samples

    @property
    def steps_left(self) -> int:
        return self._to_max_steps(-(-self.samples_left // self.batch_size))

    @property
    def full_steps_left(self) -> int:
        """Steps with whole batches left in this epoch."""
        return self._to_max_steps(self.samples_left // self.batch_size)

    def _to_max_steps(self, steps: int) -> int:
        max_steps = self.state.settings.max_steps
        return steps if max_steps is None else min(steps, max_steps - self.state.progress.step)

    @property
    def ema_tensors(self) -> list[Tensor]:
        ema = self.state.ema
        if ema is None:
            return []
        if not ema.averages:
            ema.update()
        return list(ema.averages.values())

    def batches(self, turns: slice = slice(None)) -> Iterator[Batch]:
        progress, last = self.state.progress, self.state.settings.last_epoch
        return self.loader.epoch(progress.epoch, self.batch_size, self._parts, progress.samples, turns, last)

    def _parts(self, batch: Tensor) -> list[Part]:
        return self.state.strategy.parts(batch, self.state.settings.gradient_accumulation_steps)

    def compute_gradients(self, batch: Batch, steps_ahead: int = 0) -> None:
        """The gradient of a step is the gradient of the mean over the global batch.

        Losses are summed over samples and divided by the true global count, and multiplied by what gradient averaging
        divides by. A mean of ranks' means would be wrong wherever ranks have unequally many samples or tokens.
        """
        monitor.current_batch(batch)
        strategy, step = self.state.strategy, self.state.progress.step + steps_ahead
        if step + 1 in self.state.nan.left_out:
            return
        self.state.nan.begin(step + 1, batch)
        loss_function = partial(self._weighted_loss, step + 1, self._loss_weight(batch))
        for number, part in enumerate(batch.parts, start=1):
            self.timer.phase("forward")
            set_seed(fold_in(self.loader.seed, step, part.number))
            is_last = number == len(batch.parts)
            if not self.state.first_batch_is_checked:
                require_plain_inputs(strategy.model, part.inputs)
            strategy.forward_backward(part.inputs, part.targets, loss_function, self.autocast, is_last)
        self.timer.phase("optimizer")

    def _loss_weight(self, batch: Batch) -> float | Tensor:
        """What a sum of losses of this step is multiplied by. A collective if the task counts by values."""
        strategy = self.state.strategy
        counts = [self.state.task.count(part.targets) for part in batch.parts]
        counted = [count for count in counts if isinstance(count, Tensor)]
        if not counted:
            return strategy.gradient_divide_factor() / batch.count
        total = strategy.sum_counts(torch.stack(counted).sum()).double()
        return strategy.gradient_divide_factor() / total.clamp(min=1)  # without any counted, the loss is 0

    def _weighted_loss(self, step: int, weight: float | Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss as it is minimised: summed, times `weight`, scaled for fp16. Its sums go to the meter."""
        if not self.state.first_batch_is_checked:
            require_one_tensor(self.state.task, outputs)
            self.state.first_batch_is_checked = require_sums(self.state.task, outputs, targets)
        loss, sums = self.state.task(outputs, targets)
        if self.state.strategy.counts_samples:
            self.state.meter.add(sums, self.state.task.count(targets), step)
        weighted = loss * (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight)
        if self.scales_loss:
            weighted = self.state.scaler.scale(weighted)
        self.timer.phase("backward")
        return weighted

    def apply_gradients(self) -> None:
        self.state.before_update()
        if self._update_is_good():
            self._update()
        else:  # torch warns of a schedule that steps before the first update
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.scheduler.step()

    def _update_is_good(self) -> bool:
        """Whether the optimizer shall step. Raises TrainingDiverged as `NanPolicy.accepts` does."""
        nan, step = self.state.nan, self.state.progress.step + 1
        if step in nan.left_out:
            return False
        groups = self.state.optimizer.param_groups
        return nan.accepts(step, [p.grad for group in groups for p in group["params"] if p.grad is not None])

    def _update(self) -> None:
        state = self.state
        step = state.progress.step + 1
        if state.settings.is_logged(step):
            state.grad_norm = step, state.strategy.grad_norm() / self._loss_scale()
        if state.gradients is not None and self.steps_left == 1:
            named = state.strategy.model.named_parameters()
            scale = self._loss_scale()
            state.gradients = {name: p.grad / scale for name, p in named if p.grad is not None}
        if state.settings.max_grad_norm is not None:
            state.scaler.unscale_(state.optimizer)
            state.strategy.clip_grad_norm(state.settings.max_grad_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        if state.ema is not None:
            state.ema.update()

    def _loss_scale(self) -> float:
        return self.state.scaler.get_scale() if self.scales_loss else 1.0


def set_seed(seed: int) -> None:
    """Seed what dropout draws from. torch.manual_seed does this too, and takes 0.5 ms where torch could use a GPU."""
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)
