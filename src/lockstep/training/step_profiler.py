"""What is measured of single steps: how long their phases take, and traces of torch's profiler."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lockstep.loggers.base import Logger
from lockstep.training.state import TrainState
from lockstep.training.timing import StepTimer, StepTimes

log = logging.getLogger(__name__)


class StepProfiler(StepTimer):
    """Measures or traces the steps that are due. Between them, a call of `phase` costs one attribute test.

    A step is measured from the end of the step before it. So the first step of an epoch is never measured, and neither
    is a step with a smaller batch, which takes less time.

    A measured step is logged as {"profile/data_ms": ..., ..., "profile/step_ms": their sum}, in milliseconds.

    run_dir: a trace is run_dir/trace/rank<R>.<step>.pt.trace.json.
    every: one of `every` steps is measured.
    trace_after: after this many steps, which warm up, `trace_steps` steps are traced, on every rank.
    """

    def __init__(
        self,
        state: TrainState,
        logger: Logger,
        run_dir: str | Path,
        every: int,
        trace_after: int,
        trace_steps: int,
    ) -> None:
        self.state, self.logger, self.trace_dir = state, logger, Path(run_dir) / "trace"
        self.device = state.strategy.world.device
        self.every, self.trace_after, self.trace_steps = every, trace_after, trace_steps
        # The warm-up step and the traced steps. An epoch with fewer steps is traced to its end.
        whole_batches = state.settings.epoch_samples // state.settings.batch_size
        self._trace_length = min(1 + trace_steps, whole_batches - 1)
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
            rank, step = self.state.strategy.world.rank, self.state.progress.step
            path = self.trace_dir / f"rank{rank}.{step}.pt.trace.json"
            return StepTrace(self.device, path, self.trace_steps)
        if self._steps_since_measured >= self.every - 1:
            self._steps_since_measured = -1  # the measured step itself makes it 0
            return StepTimes(self.device, list(self.state.strategy.model.parameters()))
        return None

    def _log_times(self, wait: bool) -> None:
        """Log a measured step once its times are known. On a GPU that may be a few steps later."""
        times = self._unread.milliseconds(wait) if self._unread is not None else None
        if times is not None:
            self._unread = None
            metrics = {f"profile/{phase}_ms": value for phase, value in times.items()}
            self.logger.log_metrics(metrics, self.state.progress.step)


class StepTrace:
    """torch's profiler over a few steps, for TensorBoard and Perfetto.

    Records `steps` steps after one step of warm-up. Each phase of a step is a range named "lockstep: <phase>".
    """

    def __init__(self, device: torch.device, path: Path, steps: int) -> None:
        # Kineto writes to the console at every start, also about GPUs that do not exist.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.path, self._steps_left = path, 1 + steps
        self._range: record_function | None = None
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps),
            on_trace_ready=self._export,
        )
        self._profiler.start()

    def phase(self, name: str) -> None:
        """The phase `name` begins."""
        self._end_range()
        self._range = record_function(f"lockstep: {name}")
        self._range.__enter__()

    def step_end(self) -> bool:
        """Returns whether this was the last step to record. Its end writes the file."""
        self._end_range()
        self._steps_left -= 1
        if self._steps_left == 0:
            self.stop()
            return True
        self._profiler.step()
        return False

    def stop(self) -> None:
        """Write what was recorded so far."""
        self._end_range()
        self._profiler.stop()

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _export(self, profiler: Any) -> None:
        """Write the whole file or none. A full disk does not end the training."""
        unfinished = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(unfinished))
            os.replace(unfinished, self.path)
            log.info("trace: %s", self.path)
        except OSError as error:
            log.warning("the trace cannot be written (%s); training goes on", error)
