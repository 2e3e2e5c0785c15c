"""The contract of a search: which job a sweep runs next. The list of jobs that was typed is the first one."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.sweeps.table import FAILED, FINISHED, PRUNED, RUNNING, WAITING, Row, SweepTable

LONGEST_NAME = 120  # characters of a job's folder


@dataclass(frozen=True)
class Job:
    """One run of a sweep. overrides: all words of its command. number: its row in the table.

    part: in words, which part of the run this is, empty for a whole run.
    """

    number: int
    overrides: tuple[str, ...]
    part: str = ""

    def describe(self, changed: str) -> str:
        """ "job 3, optimizer.lr=0.1, to epoch 3 of 9". changed: what it changes."""
        return ", ".join(filter(None, [f"job {self.number}", changed or "no override", self.part]))


class Search:
    """Chooses the jobs of a sweep while it runs. `ask` and `tell` are called by the sweep's parent process alone."""

    def ask(self) -> Job | None:
        """The next job to start, which has a row in the table. None: none until the next `tell`.

        The sweep ends when this returns None and no job runs. The same number may be asked for again, with other
        overrides: the run then goes on from its snapshot in the same folder.
        """
        raise NotImplementedError

    def tell(self, number: int, objective: float | None) -> None:
        """A job has ended. objective: what its run returned, None if it has not finished. Its state is in the table."""


class JobList(Search):
    """The jobs that a command lists. Those that an earlier command has finished in this folder are left out."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.waiting = list(jobs)

    def ask(self) -> Job | None:
        return self.waiting.pop(0) if self.waiting else None


def changed_words(overrides: Sequence[str], fixed: set[str]) -> str:
    """What a job changes, as words of a shell: its overrides without those that all jobs have."""
    return shlex.join(word for word in overrides if word not in fixed)


def varied_keys(rows: Sequence[Row]) -> set[str]:
    """The keys that the jobs of a table change."""
    return {word.partition("=")[0] for row in rows for word in shlex.split(row.overrides)}


def add_jobs(
    table: SweepTable,
    lists: Sequence[Sequence[str]],
    fixed: set[str],
    name: Callable[[int, str, Sequence[str]], str],
) -> list[Job]:
    """A row for each job that has none yet, with the next numbers. Returns all these jobs with their numbers.

    lists: the overrides of each; the same ones twice are two jobs. name: a job's folder, from its number, what it
    changes, and its overrides.
    """
    known: dict[str, list[int]] = {}
    for row in table:
        known.setdefault(row.overrides, []).append(row.number)
    added, jobs, next_number = [], [], max(table.rows, default=-1) + 1
    for overrides in lists:
        changed = changed_words(overrides, fixed)
        if known.get(changed):
            number = known[changed].pop(0)
        else:
            number, next_number = next_number, next_number + 1
            added.append(Row(number, changed, name(number, changed, overrides)))
        jobs.append(Job(number, tuple(overrides)))
    table.add(added)
    return jobs


def over(retry_failed: bool) -> set[str]:
    """The states of jobs that do not run again."""
    return {FINISHED, PRUNED} if retry_failed else {FINISHED, PRUNED, FAILED}


def to_run(table: SweepTable, jobs: Sequence[Job], retry_failed: bool) -> list[Job]:
    """Those of `jobs` that have to run: not those that are over or run elsewhere, failed ones with `retry_failed`."""
    done = over(retry_failed) | {RUNNING}
    chosen = [job for job in jobs if table.rows[job.number].state not in done]
    for job in chosen:
        if table.rows[job.number].state == FAILED:
            table.update(job.number, state=WAITING, cause="")
    return chosen


def folder_name(number: int, changed: str) -> str:
    """A job's folder: its number, and what it changes. Safe for file systems, shells and Hydra's grammar."""
    words = "+".join(word.removeprefix("+") for word in shlex.split(changed))
    safe = re.sub(r"[^\w.=+-]", "-", words, flags=re.ASCII)
    return f"{number}_{safe}"[:LONGEST_NAME].rstrip("_")
