"""What is left to do when Hydra has run all jobs of a sweep: the summary, and the exit code of the command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.errors import ConfigError
from lockstep.sweeps.output import show


def refuse_foreign_launcher(name: str | None) -> None:
    """Raise ConfigError for a launcher of Hydra's, such as joblib. name: of the launcher that was chosen, if any."""
    if name not in (None, "lockstep"):
        raise ConfigError(
            f"hydra/launcher={name} cannot run these jobs; leave it out, and for several jobs at once type "
            f"sweep.slots=2, or for jobs on a cluster launch=slurm"
        )


class JobFailed(Exception):
    """What a sweeper of Hydra's raises to end at a job that has failed. The row of the job has the cause."""


class _State:
    ending: Callable[[], int] | None = None
    nothing_finished = False  # in a sweeper of Hydra's that has got its jobs' results


_state = _State()


def at_end(ending: Callable[[], int]) -> None:
    """Call `ending` at the end of this command, in place of an earlier one. It returns the exit code."""
    _state.ending = ending


def end_sweep() -> int:
    """The exit code of the sweep that this command has run; 0 if it has run none."""
    ending, _state.ending = _state.ending, None
    return ending() if ending else 0


def sweeper_goes_on(nothing_finished: bool) -> None:
    """A sweeper of Hydra's gets the results of its jobs. nothing_finished: all jobs of the sweep have failed."""
    _state.nothing_finished = nothing_finished


@contextmanager
def failed_jobs_end_sweepers() -> Iterator[None]:
    """Drop the error with which a sweeper of Hydra's ends at failed jobs, for the summary tells more.

    Optuna raises one of its own where no job has finished: there is no best one.
    """
    try:
        yield
    except JobFailed:
        pass
    except Exception as error:
        if not _state.nothing_finished:
            raise
        show(f"sweep: no job has finished, and the sweeper ends with {type(error).__name__}: {error}")
