"""A trace of a few steps by torch's profiler, for TensorBoard and Perfetto: `trainer.profiler`, a node."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, schedule

from lockstep.config.schema import Count
from lockstep.training.callbacks import Callback

if TYPE_CHECKING:
    from lockstep.loggers.base import Logger
    from lockstep.training.run import Run

log = logging.getLogger(__name__)


class Profiler(Callback):
    """Traces `steps` steps of each rank after `after` steps of this process, which warm up.

    A trace is <run folder>/trace/rank<R>.<step>.pt.trace.json.
    """

    def __init__(self, after: Count, steps: Count) -> None:
        self.after, self.steps = after, steps
        self.profiler: Any = None

    def on_fit_start(self, run: "Run", logger: "Logger") -> None:
        # Kineto writes to the console at every start, also about GPUs that do not exist.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (run.world.device.type == "cuda")]
        place = Path(
            run.config.run_dir, "trace", f"rank{run.world.rank}.{run.progress.step + self.after}.pt.trace.json"
        )
        plan = schedule(wait=max(0, self.after - 1), warmup=1, active=self.steps, repeat=1)
        self.profiler = profile(activities=activities, schedule=plan, on_trace_ready=lambda found: _write(found, place))
        self.profiler.start()

    def on_step_end(self, run: "Run") -> None:
        self.profiler.step()

    def on_fit_end(self, run: "Run") -> None:
        self.profiler.stop()


def _write(found: Any, path: Path) -> None:
    """The whole file or none. A full disk does not end the training."""
    unfinished = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(unfinished))
        os.replace(unfinished, path)
        log.info("trace: %s", path)
    except OSError as error:
        log.warning("the trace cannot be written (%s); training goes on", error)
