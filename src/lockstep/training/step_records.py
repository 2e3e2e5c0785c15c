"""What is recorded of single steps: how long their phases take, traces of torch's profiler, digests of numbers."""

import json
import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lockstep.loggers.base import Logger, RunInfo
from lockstep.loggers.csv_logger import append
from lockstep.training.state import TrainState
from lockstep.training.timing import StepTimer, StepTimes
from lockstep.training.weight_check import digest

log = logging.getLogger(__name__)

# A line of JSON with the names, then rows of 64-bit numbers: the step, and a digest for each name.
DIGESTS = "digests.bin"
EVERY = 10  # steps between two digests, for trainer.digest=on
PENDING = 20  # rows in memory at most: reading one from a GPU waits for its step


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


class StepDigests(Logger):
    """`trainer.digest`: every few steps a digest of the loss, of each gradient and of each weight, in digests.bin.

    On rank 0. The loss is that of its own samples. Gradients are averaged, and not clipped yet. Weights are those
    after the update, with the model's buffers.

    A resumed run goes on in the same file, behind the step that it resumed from.
    """

    def __init__(self, state: TrainState, every: int) -> None:
        self.state, self.every = state, every
        self.model = state.strategy.model
        self.parameters = [name for name, _ in self.model.named_parameters()]
        self.weights = [*self.parameters, *(name for name, _ in self.model.named_buffers())]
        self.names = ["loss", *(f"gradient of {name}" for name in self.parameters), *self.weights]
        self.header = f"{json.dumps({'names': self.names})}\n".encode()
        self.before: list[Tensor] = []  # digests of the loss and the gradients of a step whose update is to come
        self.rows: list[tuple[int, Tensor]] = []  # (step, digests), not in the file yet
        self.last_step = 0  # in the file

    def on_fit_start(self, run: RunInfo) -> None:
        self.path = run.run_dir / DIGESTS
        start = self.state.progress.step  # run.start_step may be earlier: other loggers get more
        if start == 0 or not _starts_with(self.path, self.header):
            self.path.write_bytes(self.header)
        self._drop_after(start)

    def on_gradients_ready(self) -> None:
        step = self.state.progress.step + 1
        self.before = []
        if step % self.every == 0:
            now = dict(self.model.named_parameters())
            gradients = [now[name].grad if name in now else None for name in self.parameters]
            losses = [loss for number, loss in self.state.meter.recent_losses if number == step]
            self.before = [self._digest(torch.stack(losses) if losses else None), *map(self._digest, gradients)]

    def on_step(self, step: int, samples: int) -> None:
        if not self.before:
            return
        # By name: a module may have put another tensor in a buffer's place.
        now: dict[str, Tensor] = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        row = torch.stack([*self.before, *(self._digest(now.get(name)) for name in self.weights)])
        self.before = []
        self.rows = [(number, digests) for number, digests in self.rows if number < step]  # after a rollback
        self.rows.append((step, row))
        if len(self.rows) >= PENDING:
            self.flush()

    def flush(self) -> None:
        if not self.rows:
            return
        if not self.path.exists():  # the run folder was deleted or moved away
            self.path.write_bytes(self.header)
        if self.rows[0][0] <= self.last_step:  # after a rollback
            self._drop_after(self.rows[0][0] - 1)
        table = torch.stack([row for _, row in self.rows]).cpu()
        steps = torch.tensor([[step] for step, _ in self.rows])
        append(self.path, torch.cat([steps, table], dim=1).numpy().tobytes())
        self.last_step, self.rows = self.rows[-1][0], []

    def close(self) -> None:
        self.flush()

    def _digest(self, tensor: Tensor | None) -> Tensor:
        device = self.state.strategy.world.device
        if tensor is None:
            return torch.zeros((), dtype=torch.int64, device=device)
        return digest(in_memory_order(tensor)).to(device)

    def _drop_after(self, step: int) -> None:
        """Keep the whole rows of the file up to `step`."""
        table = read_digests(self.path.parent)
        kept = [number for number in table.rows if number <= step] if table is not None else []
        with open(self.path, "r+b") as file:
            header = file.readline()
            file.truncate(len(header) + len(kept) * row_bytes(len(self.names)))
        self.last_step = kept[-1] if kept else 0


@dataclass(frozen=True)
class StepTable:
    """names: what a row has a digest of. rows: {step: digests}, in the order of steps."""

    names: list[str]
    rows: Mapping[int, Sequence[int]]


def row_bytes(names: int) -> int:
    """The length of a row."""
    return 8 * (names + 1)


def read_digests(folder: Path) -> StepTable | None:
    """What trainer.digest has left in a run folder. None without the file."""
    path = folder / DIGESTS
    if not path.exists():
        return None
    with open(path, "rb") as file:
        names = list(json.loads(file.readline())["names"])
        content = file.read()
    width = len(names) + 1
    numbers = array("q", content[: len(content) // row_bytes(len(names)) * row_bytes(len(names))])  # a kill cuts a row
    rows = {numbers[start]: numbers[start + 1 : start + width] for start in range(0, len(numbers), width)}
    return StepTable(names, rows)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A contiguous view of a channels_last tensor (N, C, H, W): copying one takes twice as long as its digest."""
    is_channels_last = tensor.dim() == 4 and not tensor.is_contiguous()
    is_dense = is_channels_last and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.permute(0, 2, 3, 1) if is_dense else tensor


def _starts_with(path: Path, header: bytes) -> bool:
    if not path.exists():
        return False
    with open(path, "rb") as file:
        return file.readline() == header
