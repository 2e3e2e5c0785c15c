"""Successive halving: which jobs of a sweep are trained further, as a function of the results so far.

Jamieson and Talwalkar 2016; Li et al. 2020 (ASHA). A rung is a number of epochs. The best 1/eta of the jobs that have
reached a rung go on to the next one. ASHA promotes the best of those that have reported so far, so its result depends
on which job reports first. Here a job is promoted as soon as no result that is still missing can keep it from the best
1/eta: the same jobs are promoted in whatever order they end, and a free slot seldom waits for the end of a rung.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from lockstep.sweeps.search import PAUSE, Job, Search, SweepSettings
from lockstep.sweeps.table import FAILED, FINISHED, PRUNED, RUNNING, WAITING, SweepTable

Results = Mapping[int, Mapping[int, float]]
"""{job: {epochs: objective}}: what the jobs have returned at their rungs."""


@dataclass(frozen=True)
class Rungs:
    """What is certain now. to_run: (job, epochs), in the order in which to start them. out: jobs that go no further."""

    to_run: list[tuple[int, int]]
    out: set[int]


def rung_epochs(first: int, eta: int, epochs: int) -> list[int]:
    """The rungs up to `epochs`, which is the last one: rung_epochs(1, 2, 9) is [1, 2, 4, 9].

    first: less than `epochs`. A rung is left out if the last one comes before eta times its epochs: it would drop jobs
    just before the end, and save little.
    """
    rungs = [first]
    while rungs[-1] * eta**2 <= epochs:
        rungs.append(rungs[-1] * eta)
    return [*rungs, epochs]


def climb(jobs: Sequence[int], results: Results, failed: Set[int], rungs: Sequence[int], eta: int, mode: str) -> Rungs:
    """Who runs next, given all results so far.

    jobs: all numbers. failed: jobs that will return nothing more; a failed job keeps its place in its rung, as the
    last. rungs: as of `rung_epochs`. mode: "min" or "max". Of equal objectives that of the lower number is better.
    """
    to_run: list[tuple[int, int]] = []
    out: set[int] = set()
    members, to_come, size = set(jobs), 0, len(jobs)
    for epochs in rungs[:-1]:
        values = {job: results[job][epochs] for job in members if epochs in results.get(job, {})}
        pending = sorted(members - values.keys() - failed)
        to_run += [(job, epochs) for job in pending]
        missing, size = len(pending) + to_come, max(1, size // eta)
        ranked = sorted(values, key=lambda job: _place(values[job], job, mode))
        out |= set(ranked[size:])
        members = set(ranked[: max(0, size - missing)])
        to_come = min(size, len(ranked) + missing) - len(members)
    to_run += [(job, rungs[-1]) for job in sorted(members - failed) if rungs[-1] not in results.get(job, {})]
    return Rungs(to_run, out)


def _place(value: float, job: int, mode: str) -> tuple[bool, float, int]:
    """Sorts jobs, best first. NaN is the worst."""
    if math.isnan(value):
        return True, 0.0, job
    return False, -value if mode == "max" else value, job


class Halving(Search):
    """Runs each job up to a rung, and the best of each rung up to the next one, from their snapshots.

    The column `rungs` of the table holds all that this needs to go on after a kill.
    """

    def __init__(self, table: SweepTable, jobs: Sequence[Job], settings: SweepSettings) -> None:
        self.table, self.jobs = table, {job.number: job for job in jobs}
        self.rungs = rung_epochs(settings.first_rung, settings.eta, settings.epochs)
        self.eta, self.mode = settings.eta, settings.mode
        self.asked: dict[int, int] = {}  # job -> the epochs up to which it runs now
        self.over: set[int] = set()  # jobs that have stopped in this command
        self.results = {number: table.rows[number].results for number in self.jobs}
        self._write_states()

    def ask(self) -> Job | None:
        for number, epochs in self._climb().to_run:
            if number not in self.asked and number not in self.over:
                self.asked[number] = epochs
                job = self.jobs[number]
                pause = () if epochs == self.rungs[-1] else (f"{PAUSE}={epochs}",)
                return Job(number, (*job.overrides, *pause), f"to epoch {epochs} of {self.rungs[-1]}")
        return None

    def tell(self, number: int) -> None:
        epochs, row = self.asked.pop(number), self.table.rows[number]
        if row.state == FINISHED and row.objective is not None:
            self.results[number][epochs] = row.objective
            self.table.update(
                number, rungs=" ".join(f"{rung}:{value!r}" for rung, value in self.results[number].items())
            )
        else:
            self.over.add(number)
        self._write_states()

    def outlook(self) -> str:
        sizes = itertools.accumulate(self.rungs[1:], lambda size, _: max(1, size // self.eta), initial=len(self.jobs))
        parts = [f"{size} to epoch {epochs}" for size, epochs in zip(sizes, self.rungs, strict=True)]
        return f"halving trains {', '.join(parts)}; which ones go on is known when the others have ended"

    def verdict(self) -> str:
        """The share of all training that it took."""
        trained, whole = sum(max(row.results, default=0) for row in self.table), self.rungs[-1] * len(self.table.rows)
        return f"trained:    {trained} epochs, {trained / whole:.2f} of the {whole} of all jobs" if trained else ""

    def _climb(self) -> Rungs:
        failed = {number for number in self.jobs if self.table.rows[number].state == FAILED}
        return climb(list(self.jobs), self.results, failed, self.rungs, self.eta, self.mode)

    def _write_states(self) -> None:
        """Of the jobs that do not run: finished at the last rung, pruned if they end below it, else waiting."""
        now = self._climb()
        for number, results in self.results.items():
            row = self.table.rows[number]
            if not results or number in self.asked or number in self.over or row.state in (FAILED, RUNNING):
                continue
            state = FINISHED if self.rungs[-1] in results else PRUNED if number in now.out else WAITING
            if state != row.state:
                self.table.update(number, state=state)
