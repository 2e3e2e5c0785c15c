"""How long the phases of a step take, and how much memory is used."""

import resource
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

MIB = 2**20
PHASES = ("data", "forward", "backward", "gradient_sync", "optimizer", "logging")


class StepTimer:
    """Measures nothing. The profiler overrides these methods; the loop calls them."""

    def phase(self, name: str) -> None:
        """The phase `name`, one of PHASES, begins, and the one before ends."""

    def step_end(self, full_steps_left: int) -> None:
        """A step has ended, logging included. `full_steps_left`: steps with whole batches left in this epoch."""

    def epoch_end(self) -> None:
        """The epoch's last step has ended. Whatever is still being measured ends now."""


Moment = float | torch.cuda.Event
"""A time in seconds on a CPU; on a GPU an event in its queue of work."""


class StepTimes:
    """The phases of one step by the device's own clock, without waiting for the device.

    The phase gradient_sync lasts from this rank's last gradient to the end of its backward pass: the part of gradient
    averaging that does not overlap with computation.
    """

    def __init__(self, device: torch.device, parameters: Sequence[nn.Parameter]) -> None:
        self.device = device
        self._begins: list[tuple[str, Moment]] = []  # phase and when it began; the last one is the end of the step
        self._last_gradient: Moment | None = None
        # Hooks of parameters. A hook of a module would make torch.compile compile the model again.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _on_gradient(self, parameter: Tensor) -> None:
        self._last_gradient = now(self.device)

    def phase(self, name: str) -> None:
        """The phase `name` begins."""
        if self._last_gradient is not None:
            self._begins.append(("gradient_sync", self._last_gradient))
            self._last_gradient = None
        self._begins.append((name, now(self.device)))

    def step_end(self) -> bool:
        """Returns True: one step is all that is measured."""
        self.phase("end")
        self.stop()
        return True

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def milliseconds(self, wait: bool) -> dict[str, float] | None:
        """{phase: milliseconds, ..., "step": their sum}. None if the device has not finished the step; `wait` waits."""
        last = self._begins[-1][1]
        if isinstance(last, torch.cuda.Event):
            if wait:
                last.synchronize()
            if not last.query():
                return None
        times = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in pairwise(self._begins):
            if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                times[phase] += begin.elapsed_time(end)
            elif isinstance(begin, float) and isinstance(end, float):
                times[phase] += 1000 * (end - begin)
        return times | {"step": sum(times.values())}


def now(device: torch.device) -> Moment:
    """This moment on the device's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def used_memory(device: torch.device) -> float:
    """In MiB: on a GPU the most that its tensors ever had, on a CPU what the process has now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / MIB
    return peak_memory(device)


def peak_memory(device: torch.device) -> float:
    """In MiB: the most that its tensors on a GPU, or the process on a CPU, ever had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return most / 2**10 if sys.platform == "linux" else most / MIB
