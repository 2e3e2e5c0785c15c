"""How long the phases of one training step take."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from lockstep.training.timer import PHASES

Moment = float | torch.cuda.Event
"""A time in seconds on a CPU; on a GPU an event in its queue of work."""

Clock = Callable[[torch.device], Moment]


class StepTimes:
    """The phases of one step by the device's own clock, without waiting for the device.

    The phase gradient_sync lasts from this rank's last gradient to the end of its backward pass: the part of gradient
    averaging that does not overlap with computation. clock: `now` or `own_time`.
    """

    def __init__(self, device: torch.device, parameters: Sequence[nn.Parameter], clock: Clock | None = None) -> None:
        self.device, self.clock = device, clock or now
        self._begins: list[tuple[str, Moment]] = []  # phase and when it began; the last one is the end of the step
        self._last_gradient: Moment | None = None
        # Hooks of parameters. A hook of a module would make torch.compile compile the model again.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _on_gradient(self, parameter: Tensor) -> None:
        self._last_gradient = self.clock(self.device)

    def phase(self, name: str) -> None:
        """The phase `name` begins."""
        if self._last_gradient is not None:
            self._begins.append(("gradient_sync", self._last_gradient))
            self._last_gradient = None
        self._begins.append((name, self.clock(self.device)))

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
            times[phase] += milliseconds_between(begin, end)
        return times | {"step": sum(times.values())}


def now(device: torch.device) -> Moment:
    """This moment on the device's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def milliseconds_between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end))
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return 1000 * (end - begin)
