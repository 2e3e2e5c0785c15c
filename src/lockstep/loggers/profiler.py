"""How long the phases of a training step take: some steps are measured, and a few are traced by torch's profiler."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from lockstep.loggers.trace import StepTrace
from lockstep.training.timing import StepTimer, StepTimes


class StepProfiler(StepTimer):
    """Measures or traces the steps that are due. Between them, a call of `phase` costs one attribute test.

    A step is measured from the end of the step before it. So the first step of an epoch is never measured, and neither
    is a step with a smaller batch, which takes less time.

    parameters: of the model, for the end of the gradient computation. log_metrics: receives {"profile/data_ms": ...,
    ..., "profile/step_ms": their sum}, in milliseconds. current_step: optimizer steps done. every: one of `every` steps
    is measured. trace_after: after this many steps, which warm up, `trace_steps` steps are traced, on every rank, into
    run_dir/trace/rank<R>.<step>.pt.trace.json.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        parameters: Sequence[nn.Parameter],
        log_metrics: Callable[[dict[str, float]], None],
        run_dir: str | Path,
        current_step: Callable[[], int],
        whole_batches_per_epoch: int,
        every: int,
        trace_after: int,
        trace_steps: int,
    ) -> None:
        self.device, self.rank, self.parameters = device, rank, parameters
        self.log_metrics, self.trace_dir, self.current_step = log_metrics, Path(run_dir) / "trace", current_step
        self.every, self.trace_after, self.trace_steps = every, trace_after, trace_steps
        # The warm-up step and the traced steps. An epoch with fewer steps is traced to its end.
        self._trace_length = min(1 + trace_steps, whole_batches_per_epoch - 1)
        self._traced = False
        self._steps = 0  # of this process
        self._steps_since_measured = 0
        self._active: StepTimes | StepTrace | None = None  # what observes the current step
        self._unread: StepTimes | None = None  # a measured step that a GPU may still be working on

    def phase(self, name: str) -> None:
        if self._active is not None:
            self._active.phase(name)

    def step_end(self, full_steps_left: int) -> None:
        self._steps += 1
        self._steps_since_measured += 1
        if self._active is not None and self._active.step_end():
            if isinstance(self._active, StepTimes):
                self._unread = self._active
            self._active = None
        if self._unread is not None:
            self._log_times(wait=False)
        if self._active is None and self._unread is None and full_steps_left > 0:
            self._active = self._observer_of_next_step(full_steps_left)

    def epoch_end(self) -> None:
        """Also right after an exception in the epoch: hooks are removed, and a trace is written as far as it came."""
        if self._active is not None:
            self._active.stop()
            self._active = None
        if self._unread is not None:
            self._log_times(wait=True)

    def _observer_of_next_step(self, full_steps_left: int) -> "StepTimes | StepTrace | None":
        if not self._traced and self._steps >= self.trace_after and full_steps_left >= self._trace_length:
            self._traced = True
            path = self.trace_dir / f"rank{self.rank}.{self.current_step()}.pt.trace.json"
            return StepTrace(self.device, path, self.trace_steps)
        if self._steps_since_measured >= self.every - 1:
            self._steps_since_measured = -1  # the measured step itself makes it 0
            return StepTimes(self.device, self.parameters)
        return None

    def _log_times(self, wait: bool) -> None:
        """Log a measured step once its times are known. On a GPU that may be a few steps later."""
        times = self._unread.milliseconds(wait) if self._unread is not None else None
        if times is not None:
            self._unread = None
            self.log_metrics({f"profile/{phase}_ms": value for phase, value in times.items()})
