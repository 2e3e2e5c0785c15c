"""Runs the jobs of a sweep with a launcher of Hydra's, such as joblib's. The scan for plugins leaves this file out."""

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from hydra_plugins.lockstep_sweeper._outcomes import error_in_words, is_refusal, outcome_of
from lockstep.distributed import signals
from lockstep.distributed.host import end_with_parent
from lockstep.distributed.run_folder import SWEEP_FOLDER
from lockstep.distributed.signal_relay import Relay
from lockstep.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_RESUMABLE, ConfigError, path_value
from lockstep.failures.watched_rank import children
from lockstep.sweeps.folder import wait_for_lock
from lockstep.sweeps.job_process import LONGEST_CAUSE, Outcome, record_outcome, start_job
from lockstep.sweeps.left_rows import by_record
from lockstep.sweeps.search import Job
from lockstep.sweeps.sweep import OpenSweep
from lockstep.sweeps.table import RUNNING, STOPPED, WAITING

POLL_SECONDS = 0.02
_stops: list[int] = []  # in a worker: the signal that has stopped a job


def run_by_launcher(launcher: Launcher, sweep: OpenSweep, chosen: Sequence[Job]) -> None:
    """Run jobs with a launcher of Hydra's, which returns when all of them have ended."""
    table, batch = sweep.table, []
    for job in chosen:
        wait_for_lock(table.folder / table.rows[job.number].folder)
        row = table.update(job.number, state=RUNNING, cause="")
        # A worker composes the config again: without these words it would choose a folder of its own.
        folder, subdir = path_value(table.folder.absolute()), path_value(row.folder)
        batch.append([*job.overrides, f"hydra.sweep.dir={folder}", f"hydra.sweep.subdir={subdir}"])
    if not batch:
        return
    # each launcher has this attribute since `setup`
    launcher.task_function = partial(run_in_fork, os.getpid())  # type: ignore[attr-defined]
    started = time.time()
    try:
        with StopWorkers():
            results = launcher.launch(batch, initial_job_idx=chosen[0].number)
    except Exception as error:  # such as joblib's, when one of its workers was killed
        traceback.print_exception(error)
        for job in chosen:
            cause = f"the launcher failed: {error_in_words(error)}"[:LONGEST_CAUSE]
            values = by_record(table.folder / table.rows[job.number].folder, started, cause) or {"state": WAITING}
            table.update(job.number, **values, **table.read_best(job.number))
        sweep.stop_code = EXIT_FAILED
        return
    finally:
        end_joblib_workers()
    for job, result in zip(chosen, results, strict=True):
        outcome, seconds = ended(result)
        record_outcome(table, job.number, outcome, outcome.state, seconds)
        if outcome.state == STOPPED:
            sweep.stop_code = max(sweep.stop_code or 0, outcome.stop_code)


class StopWorkers(Relay):
    """Passes a signal on to the processes that the launcher has started, as SIGTERM: submitit's know no other one."""

    def send(self, number: int, pids: list[int]) -> None:
        super().send(signal.SIGTERM, children(os.getpid()))


def ended(result: JobReturn) -> tuple[Outcome, float]:
    """How a job ended, and its seconds, from what its worker returned."""
    value: Any = result._return_value
    if result.status == JobStatus.COMPLETED:
        return value  # type: ignore[no-any-return]
    code = EXIT_CONFIG if isinstance(value, ConfigError) else EXIT_FAILED
    return Outcome(code, cause=error_in_words(value), refused=is_refusal(value)), 0.0


def run_in_fork(sweep: int, cfg: DictConfig) -> tuple[Outcome, float]:
    """What a worker calls for a job: run it in a process of its own, whose end does not end the worker.

    sweep: the sweep's process. When it is killed, the worker gets a SIGTERM, and the job saves and ends.
    Returns how it ended, and its seconds. A worker that was told to stop begins no other job.
    """
    if _stops:
        return Outcome(EXIT_RESUMABLE), 0.0
    hydra, parent, is_worker = HydraConfig.get(), os.getppid(), os.getpid() != sweep
    folder = Path(hydra.sweep.dir) / hydra.sweep.subdir
    with Relay() as relay:
        if is_worker:  # joblib with n_jobs=1 has none
            end_with_parent()
        with signals.blocked():
            process = start_job(Job(0, ()), lambda: _run(cfg), 0, {SWEEP_FOLDER: hydra.sweep.dir}, set(), False)
            relay.start([process.pid])
        process.begin()
        while (outcome := process.poll(folder)) is None:
            time.sleep(POLL_SECONDS)
    if relay.first is not None:
        _stops.append(relay.first)
        if is_worker and os.getppid() != parent:  # joblib's would wait for the killed sweep for ever
            os._exit(outcome.code if outcome.code > 0 else EXIT_FAILED)
    return outcome, time.monotonic() - process.started


def _run(cfg: DictConfig) -> Outcome:
    """Run the entry point in this process. It is imported by its name, as the ranks that it starts do it."""
    multiprocessing.set_start_method(None, force=True)  # joblib's workers have one of their own, which ranks lack
    return outcome_of(lambda: importlib.import_module("train").main.__wrapped__(cfg))


def end_joblib_workers() -> None:
    """joblib keeps its workers for later calls, and they would outlive this command.

    It removes their folders when Python exits, which this command leaves out; it would be told of a leak.
    """
    loky = sys.modules.get("joblib.externals.loky")
    if loky is None:
        return
    executor = loky.get_reusable_executor(reuse=True)
    executor.shutdown(wait=True)
    folders = getattr(executor, "_temp_folder_manager", None)  # n_jobs=1 has none
    for remove in folders._finalizers.values() if folders else ():
        remove()
