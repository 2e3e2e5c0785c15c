"""What is refused before the first job of a sweep starts. The scan for plugins leaves this file out."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, NoReturn

from omegaconf import DictConfig, OmegaConf

from lockstep import cli
from lockstep.config.schema import Node
from lockstep.distributed import signals
from lockstep.distributed.host import end_with_parent
from lockstep.errors import ConfigError
from lockstep.hydra_errors import as_config_error
from lockstep.source_code import module_hashes
from lockstep.sweeps.constraints import Constraint
from lockstep.sweeps.search import changed_words
from lockstep.sweeps.table import FINISHED, read_rows

if TYPE_CHECKING:
    from hydra_plugins.lockstep_sweeper._jobs import HydraJobs
    from hydra_plugins.lockstep_sweeper._searches import Plan

MISSING = object()
PREFLIGHTED = 200  # jobs; their configs stay in memory until then

Checked = Sequence[tuple[Sequence[str], Node]]
"""(overrides, all values of the config) of jobs."""


def constrained(jobs: "HydraJobs") -> Callable[[Sequence[str]], bool]:
    """Whether the config of a job with these overrides satisfies `sweep.constraints`. Raises ConfigError."""
    constraints = [Constraint(text) for text in jobs.base.sweep.constraints]

    def allows(overrides: Sequence[str]) -> bool:
        if not constraints:
            return True
        config = jobs.compose(overrides, 0)
        keys = {key for constraint in constraints for key in constraint.keys}
        found = {key: OmegaConf.select(config, key, default=MISSING) for key in keys}
        values = {key: value for key, value in found.items() if value is not MISSING}
        return all(constraint.holds(values) for constraint in constraints)

    return allows


def check_jobs(jobs: "HydraJobs", lists: Sequence[Sequence[str]]) -> Checked:
    """Raise ConfigError for the first job whose values alone are wrong. Writes nothing. Without torch."""
    finished = {row.overrides for row in read_rows(jobs.folder) if row.state == FINISHED}
    checked: list[tuple[Sequence[str], Node]] = []
    for number, overrides in enumerate(lists):
        if changed_words(overrides, set(jobs.fixed)) not in finished:
            with _naming(overrides, jobs.fixed):
                values = cli.check_values(jobs.config(overrides, number))
            if len(checked) < PREFLIGHTED:
                checked.append((overrides, values))
    return checked


def preflight_jobs(checked: Checked, plan: "Plan") -> dict[str, str]:
    """Raise ConfigError for the first job that would be refused when it starts, as far as this needs no data.

    Returns {module: hash} of the user's modules that the jobs import.

    Of jobs that are drawn at random some may be refused: their rows say it. A forked process checks them: this one may
    not ask CUDA, as the jobs are forked from it. If that process cannot tell, the job itself does.
    """
    import lockstep.rank_imports  # noqa: F401  # what the job imports, too: torch once for all of them

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _preflight_in_child(checked, plan, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = json.loads(pipe.read() or "{}")
    os.waitpid(pid, 0)
    if told.get("refusal"):
        raise ConfigError(told["refusal"])
    modules: dict[str, str] = told.get("modules", {})
    return modules


def _preflight_in_child(checked: Checked, plan: "Plan", writer: int) -> NoReturn:
    try:
        signals.end_at_signals()
        end_with_parent()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)  # a module of the user's may print: each job prints it again
        os.dup2(nothing, 2)
        told = {"refusal": _refusal(checked, plan), "modules": module_hashes(users_only=True)}
        with open(writer, "w") as pipe:
            json.dump(told, pipe)
    finally:
        os._exit(0)


def _refusal(checked: Checked, plan: "Plan") -> str:
    """What is wrong with the first job that is refused. Of jobs that are drawn: with the first one, if all are."""
    sentences = (_wrong(overrides, values, plan.fixed) for overrides, values in checked)
    if not plan.are_drawn:
        return next(filter(None, sentences), "")
    refused = list(takewhile(bool, sentences))
    return refused[0] if refused and len(refused) == len(checked) else ""


def _wrong(overrides: Sequence[str], values: Node, fixed: Sequence[str]) -> str:
    """Why a job is refused, empty if it is not."""
    from lockstep.preflight import preflight_job

    try:
        with _naming(overrides, fixed):
            preflight_job(DictConfig(values), overrides)
    except ConfigError as error:
        return str(error)
    return ""


@contextmanager
def _naming(overrides: Sequence[str], fixed: Sequence[str]) -> Iterator[None]:
    """An error of the user's input becomes a ConfigError that begins with what the job changes."""
    try:
        yield
    except Exception as error:
        known = as_config_error(error, list(overrides))
        if known is None:
            raise
        changed = changed_words(overrides, set(fixed))
        raise ConfigError(f"the job {changed}: {known}" if changed else str(known)) from error
