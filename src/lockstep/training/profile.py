"""A trace of a few steps by torch's profiler, for TensorBoard and Perfetto: `trainer.profiler`, a node."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from lockstep.config.schema import Count
from lockstep.training.callbacks import Callback

if TYPE_CHECKING:
    from lockstep.loggers.base import Logger
    from lockstep.training.run import Run


@dataclass(eq=False)
class Profiler(Callback):
    """Traces `steps` steps of each rank after `after` steps of this process, which warm up, into
    <run folder>/trace/rank<R>.<step>.<time>.pt.trace.json."""

    after: Count
    steps: Count

    def on_fit_start(self, run: "Run", logger: "Logger") -> None:
        # Kineto writes to the console at every start, also about GPUs that do not exist.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (run.world.device.type == "cuda")]
        name = f"rank{run.world.rank}.{run.progress.step + self.after}"
        write = tensorboard_trace_handler(str(Path(run.config.run_dir, "trace")), name)
        plan = schedule(wait=max(0, self.after - 1), warmup=1, active=self.steps, repeat=1)
        self.profiler: Any = profile(activities=activities, schedule=plan, on_trace_ready=write)
        self.profiler.start()

    def on_step_end(self, run: "Run") -> None:
        self.profiler.step()

    def on_fit_end(self, run: "Run") -> None:
        self.profiler.stop()
