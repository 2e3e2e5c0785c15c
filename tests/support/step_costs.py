"""Counts what steps cost without a clock: calls of Python, and operators of torch."""

import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.training.callbacks import Callback

STEPS = 100  # in which calls are counted, and in as many later ones operators


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Counter:
    """Counts calls from step 1 of a window on, and operators in the next window: each changes what the other counts."""

    def __init__(self, first: int) -> None:
        self.first, self.calls, self.operators = first, 0, Operators()

    def after(self, step: int) -> None:
        """`step` steps are done."""
        match step - self.first:
            case 0:
                sys.setprofile(self._count)
            case n if n == STEPS:
                sys.setprofile(None)
                self.operators.__enter__()
            case n if n == 2 * STEPS:
                self.operators.__exit__(None, None, None)

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event == "call" and frame.f_code.co_name not in ("after", "on_step_end")

    @property
    def found(self) -> tuple[float, float]:
        return self.calls / STEPS, self.operators.count / STEPS


class Counting(Callback):
    """In the second epoch, whose steps find what the first epoch has made."""

    def __init__(self, first: int) -> None:
        self.counter = Counter(first)

    def on_step_end(self, run: Any) -> None:
        self.counter.after(run.progress.step)
