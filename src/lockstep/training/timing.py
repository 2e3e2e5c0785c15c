"""How long the phases of a step take, which rank is slow, and how much memory is used."""

import logging
import math
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from lockstep.distributed.world import World

PHASES = ("data", "forward", "backward", "gradient_sync", "optimizer", "logging")


class StepTimer:
    """Measures nothing. The profiler and the watch for slow ranks override these methods; the loop calls them."""

    def phase(self, name: str) -> None:
        """The phase `name`, one of PHASES, begins, and the one before ends."""

    def step_end(self, full_steps_left: int) -> None:
        """A step has ended, logging included. `full_steps_left`: steps with whole batches left in this epoch."""

    def epoch_end(self) -> None:
        """The epoch's last step has ended. Whatever is still being measured ends now."""


Moment = float | torch.cuda.Event
"""A time in seconds on a CPU; on a GPU an event in its queue of work."""

Clock = Callable[[torch.device], Moment]


class StepTimes:
    """The phases of one step by the device's own clock, without waiting for the device.

    The phase gradient_sync lasts from this rank's last gradient to the end of its backward pass: the part of gradient
    averaging that does not overlap with computation. clock: `now`, or one that stops while a rank waits.
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


log = logging.getLogger(__name__)

MIB = 2**20
STEPS = 100  # a rank is named after it was slow in the measured ones of so many steps
FEWEST_MEASURED = 3
SECONDS = 5.0  # and for as long without a break: other programs of the machine may take a core for a moment
NOISE = 1.0  # milliseconds: a smaller difference is not worth a line
MOST_CURVES = 16  # ranks: in a larger world the slowest and the fastest one must do
PARTS = {"data": "data", "forward": "computing", "backward": "computing", "optimizer": "computing"}
PARTS |= {"logging": "writing"}
NAMES = ("data", "computing", "writing")  # what a rank does by itself
COLUMNS = (*NAMES, "waiting")

Times = list[list[float]]
"""For each rank the milliseconds of each of NAMES, or of COLUMNS."""


class StragglerWatch(StepTimer):
    """Measures one step in each interval of `log_every` steps. The times are exchanged with the loss at the next log.

    factor: how many times as long as the others' median a rank must take to be named. inner: the run's own timer.
    Nothing waits: on a GPU a time is left out if it is not known by the next log.
    """

    def __init__(
        self, world: World, parameters: Sequence[nn.Parameter], factor: float, log_every: int, inner: StepTimer
    ) -> None:
        self.world, self.parameters, self.factor = world, parameters, factor
        self.log_every, self.inner = log_every, inner
        self.measured: StepTimes | None = None  # the step under way
        self.unread: StepTimes | None = None  # the last one that has ended
        self.waited = 0.0  # seconds in it in which the host waited for other ranks
        self.steps_since_log = 0
        self.window: deque[Times] = deque(maxlen=max(FEWEST_MEASURED, math.ceil(STEPS / log_every)))
        self.slow_for: dict[int, float] = {}  # seconds for which each slow rank has been slow without a break
        self.named: set[int] = set()

    def phase(self, name: str) -> None:
        self.inner.phase(name)
        if self.measured is not None:
            self.measured.phase(name)

    def step_end(self, full_steps_left: int) -> None:
        if self.measured is not None:
            self.measured.step_end()
            self.waited += self.world.waiting.seconds
            self.unread, self.measured = self.measured, None
        self.inner.step_end(full_steps_left)
        if self.steps_since_log == 0 and full_steps_left > 0:
            self.measured = StepTimes(self.world.device, self.parameters, self._own_time)
            self.waited = -self.world.waiting.seconds
        self.steps_since_log += 1

    def epoch_end(self) -> None:
        if self.measured is not None:
            self.measured.stop()
            self.measured = None
        self.inner.epoch_end()

    def _own_time(self, device: torch.device) -> Moment:
        """This moment on the device's clock. On a CPU this clock stops while the rank waits for others."""
        moment = now(device)
        return moment - self.world.waiting.seconds if isinstance(moment, float) else moment

    def own_times(self) -> Tensor:
        """(ranks * len(COLUMNS),): zeros but for this rank's times, if it knows any. A log comes next."""
        self.steps_since_log = 0
        rows = torch.zeros(self.world.size, len(COLUMNS), dtype=torch.float64)
        phases = None if self.unread is None else self.unread.milliseconds(wait=False)
        if phases is not None:
            self.unread = None
            for phase, part in PARTS.items():
                rows[self.world.rank, COLUMNS.index(part)] += phases[phase]
            rows[self.world.rank, COLUMNS.index("waiting")] = phases["gradient_sync"] + 1000 * self.waited
        return rows.flatten().to(self.world.device)

    def report(self, summed: Tensor) -> dict[str, float]:
        """{tag: milliseconds}: a step's parts, and the own time of each rank, of the slowest and of the fastest one.

        summed: `own_times` over all ranks. A collective.
        """
        rows = summed.view(-1, len(COLUMNS))
        times: Times = rows[:, : len(NAMES)].tolist()
        totals = [sum(row) for row in times]
        if min(totals) == 0:
            return {}
        self.window.append(times)
        if len(self.window) == self.window.maxlen:
            self._name_stragglers(max(totals) * self.log_every / 1000)
        parts = zip(COLUMNS, rows.mean(0).tolist(), strict=True)
        metrics = {f"time/{part}_ms": milliseconds for part, milliseconds in parts}
        if len(totals) <= MOST_CURVES:
            metrics |= {f"world/rank{rank}_ms": total for rank, total in enumerate(totals)}
        return metrics | {"world/slowest_rank_ms": max(totals), "world/fastest_rank_ms": min(totals)}

    def _name_stragglers(self, seconds: float) -> None:
        """All ranks have the same times, so all of them come to the same result. seconds: since the last call."""
        found = find_stragglers(list(self.window), self.factor)
        self.slow_for = {rank: self.slow_for.get(rank, 0.0) + seconds for rank, *_ in found}
        slow = [row for row in found if row[0] not in self.named and self.slow_for[row[0]] >= SECONDS]
        if not slow:
            return
        hosts = self.world.all_gather_json(socket.gethostname())
        for rank, own, others, part in slow:
            self.named.add(rank)
            log.warning(
                "rank %d on %s is slow: its own part of a step took %.1f ms and that of the other ranks %.1f ms "
                "in the last %d steps; the difference is in %s",
                *(rank, hosts[rank], own, others, self.log_every * len(self.window), part),
            )


def find_stragglers(window: Sequence[Times], factor: float) -> list[tuple[int, float, float, str]]:
    """(rank, its milliseconds, the others' milliseconds, the name of the part with most of the difference).

    window: the times of the measured steps. Medians are compared, so a few slow steps are no reason.
    """
    ranks = range(len(window[0]))
    totals = [median(sum(times[rank]) for times in window) for rank in ranks]
    found = []
    for rank in ranks:
        peers = [other for other in ranks if other != rank]
        others = median(totals[other] for other in peers)
        if totals[rank] <= factor * others or totals[rank] - others < NOISE:
            continue
        excess = {}
        for number, name in enumerate(NAMES):
            own = median(times[rank][number] for times in window)
            excess[name] = own - median(median(times[other][number] for times in window) for other in peers)
        found.append((rank, totals[rank], others, max(excess, key=excess.__getitem__)))
    return found


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
