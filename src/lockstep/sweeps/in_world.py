"""A sweep in ranks that torchrun, srun or mpirun has started: they run each job together, in their own processes."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.distributed import signals
from lockstep.distributed.environment import RankInfo
from lockstep.distributed.run_folder import SWEEP_FOLDER
from lockstep.errors import EXIT_RESUMABLE, ConfigError
from lockstep.sweeps.ending import at_end
from lockstep.sweeps.job_process import Work, record_outcome, reported_cause
from lockstep.sweeps.output import show
from lockstep.sweeps.search import Job, Search
from lockstep.sweeps.summary import exit_code
from lockstep.sweeps.sweep import OpenSweep
from lockstep.sweeps.table import FAILED, RUNNING, STOPPED, WAITING, Row

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.02
SECONDS_AFTER_SIGNAL = 10.0  # for rank 0 to announce the end
MEETING = timedelta(seconds=300)


def run_in_world(info: RankInfo, open_sweep: Callable[[], tuple[OpenSweep, Search]], work: Work) -> None:
    """Rank 0 alone opens the sweep and keeps its table. It announces each job to the other ranks through the store.

    A rank that is killed ends this way to run a sweep: the program that has started the ranks then ends all of them,
    and the table says where to go on. Raises ConfigError on every rank if the sweep cannot be opened.
    """
    from lockstep.distributed.rendezvous import form_group

    store = form_group(info, MEETING)  # a part of the store that no earlier start of these ranks has written to
    if info.is_rank_zero:
        _lead(_Announcements(store), open_sweep, work)
    else:
        _follow(store, work)


def restarted() -> bool:
    """Whether torchrun has started these ranks again. The job that a killed rank has failed is then tried again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


class _Announcements:
    """What rank 0 tells the other ranks, one message after the other."""

    def __init__(self, store: "Store") -> None:
        self.store, self.number = store, 0

    def add(self, **told: Any) -> None:
        self.store.set(f"turn/{self.number}", json.dumps(told))
        self.number += 1


def _lead(announced: _Announcements, open_sweep: Callable[[], tuple[OpenSweep, Search]], work: Work) -> None:
    try:
        sweep, search = open_sweep()
        _run_jobs(announced, sweep, search, work)
    except ConfigError as error:  # also if the table cannot be written any more
        announced.add(problem=str(error))
        raise
    announced.add(exit_code=exit_code(list(sweep.table), sweep.stop_code))


def _run_jobs(announced: _Announcements, sweep: OpenSweep, search: Search, work: Work) -> None:
    table = sweep.table
    os.environ[SWEEP_FOLDER] = str(table.folder)
    while not signals.stop_requested() and not sweep.is_hopeless:
        job = search.ask()
        if job is None:
            break
        row = table.update(job.number, state=RUNNING, cause="")
        show(f"sweep: {job.describe(row.overrides)}")
        announced.add(number=job.number, overrides=job.overrides, folder=row.folder, sweep=str(table.folder))
        started = time.time()
        outcome = work(job, row)
        if outcome.state == FAILED:  # the report names the rank that failed first
            sweep.failures += 1
            outcome = replace(outcome, cause=reported_cause(table.folder / row.folder, started) or outcome.cause)
        state = WAITING if outcome.rank_is_missing else outcome.state
        record_outcome(table, job.number, outcome, state, time.time() - started)
        search.tell(job.number, outcome.objective)
        if state == WAITING:  # each job after it would wait for the same rank
            sweep.stop_code = EXIT_RESUMABLE
            break
        if state == STOPPED:
            sweep.stop_code = outcome.stop_code
            break
    if signals.stop_requested() and search.ask() is not None:
        sweep.stop_code = sweep.stop_code or EXIT_RESUMABLE


def _follow(store: "Store", work: Work) -> None:
    turn = 0
    while "exit_code" not in (told := json.loads(_wait(store, f"turn/{turn}"))):
        if "problem" in told:
            raise ConfigError(told["problem"])
        os.environ[SWEEP_FOLDER] = told["sweep"]
        job = Job(told["number"], tuple(told["overrides"]))
        work(job, Row(job.number, "", told["folder"]))
        turn += 1
    at_end(lambda: told["exit_code"])


def _wait(store: "Store", key: str) -> str:
    """The value of `key`, however long rank 0 needs: it may still be in the job before."""
    asked: float | None = None
    while not store.check([key]):
        if signals.stop_requested():
            asked = asked or time.monotonic()
            if time.monotonic() - asked > SECONDS_AFTER_SIGNAL:
                return json.dumps({"exit_code": EXIT_RESUMABLE})
        time.sleep(POLL_SECONDS)
    return store.get(key).decode()
