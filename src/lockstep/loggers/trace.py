"""torch's profiler over a few training steps. TensorBoard and Perfetto read the file."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

log = logging.getLogger(__name__)


class StepTrace:
    """Records `steps` steps after one step of warm-up. Each phase of a step is a range named "lockstep: <phase>"."""

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
