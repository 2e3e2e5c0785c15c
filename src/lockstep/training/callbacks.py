"""What looks at a run while it trains, on every rank. The config lists them in `callbacks:`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.loggers.base import Logger
    from lockstep.training.run import Run


class Callback:
    """Here every method does nothing. A method may raise to end the run; it must not change weights or gradients
    differently on different ranks."""

    def on_fit_start(self, run: "Run", logger: "Logger") -> None:
        """Before the first step of this process. logger: takes numbers and images; on other ranks than 0 it does
        nothing."""

    def on_step_end(self, run: "Run") -> None:
        """After each step. `.grad` has its gradients, averaged over the ranks, and clipped if the config says so."""

    def on_evaluation(self, run: "Run", split: str, metrics: Mapping[str, float]) -> None:
        """After an evaluation of "val" or "test"."""

    def on_epoch_end(self, run: "Run") -> None:
        """After an epoch, its evaluation and its snapshot."""

    def on_fit_end(self, run: "Run") -> None:
        """After the test. Not called if the run stops early or fails."""
