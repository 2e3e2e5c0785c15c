"""How a job ended, from what its call has returned or raised. The scan for plugins leaves this file out."""

from collections.abc import Callable
from typing import Any

from lockstep import cli
from lockstep.errors import CannotStartNow, ConfigError, RankMissing
from lockstep.launchers.base import RankFailed
from lockstep.sweeps.job_process import Outcome, cause_in_words


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Call it, which returns the objective, and print its errors."""
    values: list[Any] = []
    code, error = cli.end_of(lambda: values.append(call()))
    value = values[0] if values else None
    return Outcome(code, value, error_in_words(error), is_refusal(error), isinstance(error, RankMissing))


def is_refusal(error: BaseException | None) -> bool:
    """Whether the config of a job is wrong, so that it would fail again."""
    return isinstance(error, ConfigError) and not isinstance(error, CannotStartNow)


def error_in_words(error: BaseException | None) -> str:
    """The error of a job in one line."""
    if error is None:
        return ""
    if isinstance(error, RankFailed) and "first" in error.contents:
        return cause_in_words(error.contents)
    if isinstance(error, RankFailed) and error.__cause__ is None:
        return error.headline.removeprefix("lockstep: ")
    if isinstance(error, RankFailed):
        error = error.__cause__  # this rank's own error
    return " ".join((str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}").split())
