"""What is left to do when Hydra has run all jobs of a sweep: the summary, and the exit code of the command."""

from collections.abc import Callable


class JobFailed(Exception):
    """What a sweeper of Hydra's raises to end at a job that has failed. The row of the job has the cause."""


_endings: list[Callable[[], int]] = []


def at_end(ending: Callable[[], int]) -> None:
    """Call `ending` at the end of this command, in place of an earlier one. It returns the exit code."""
    _endings[:] = [ending]


def end_sweep() -> int:
    """The exit code of the sweep that this command has run; 0 if it has run none."""
    return _endings.pop()() if _endings else 0
