"""What became of jobs that no sweep has waited for, by what they wrote to their run folders."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.distributed.environment import SLURM_JOB_FILE, is_in_queue
from lockstep.errors import ConfigError
from lockstep.runs.record import Run, read_run, state_of
from lockstep.sweeps.job_process import reported_cause
from lockstep.sweeps.table import FAILED, FINISHED, RUNNING, STOPPED, SUBMITTED, Row

STATES = {"finished": FINISHED, "paused": STOPPED, "stopped": STOPPED}  # those of run.json; others are failures


def left_by_earlier(row: Row, folder: Path) -> dict[str, Any]:
    """New values for a row that an earlier command has left as running or stopped. folder: the job's run folder."""
    job = _submitted_job(folder)
    if job is not None and is_in_queue(job):  # also if the sweep ended before it could write so
        return {"state": RUNNING, "cause": SUBMITTED}
    if row.state == STOPPED:
        return {}
    if row.cause != SUBMITTED:
        run = _read(folder)
        seconds = 0.0 if run is None else _seconds(run)  # of its lives; the row has those whose end a sweep has seen
        return {"state": STOPPED, "cause": "the sweep was killed", "seconds": max(row.seconds, seconds)}
    if job is None:
        return {}
    cause = f"Slurm job {job} has ended, see slurm-{job}.out"
    return by_record(folder, 0, cause) or {"state": FAILED, "cause": cause}


def by_record(folder: Path, since: float, cause: str) -> dict[str, Any]:
    """Values for the row of a job whose process has ended, by its run.json. Empty if it has not begun to train.

    since: a run that started earlier, in seconds since 1970, is not meant. cause: of a failure that has no report.
    """
    run = _read(folder)
    if run is None or run["lives"][-1]["started"] < since:
        return {}
    state = STATES.get(state_of(run), FAILED)
    if state == FAILED:
        cause = reported_cause(folder, run["lives"][-1]["started"]) or cause
    return {
        "state": state,
        "objective": run["objective"].get("last") if state == FINISHED else None,
        "seconds": _seconds(run),
        "cause": cause if state == FAILED else "",
    }


def _submitted_job(folder: Path) -> str | None:
    """The number of the job that was submitted to Slurm in this run folder."""
    try:
        return (folder / SLURM_JOB_FILE).read_text().strip()
    except OSError:
        return None


def _seconds(run: Run) -> float:
    """How long the lives of a run have trained. One that was killed lasted until the newest file of its folder."""
    total = 0.0
    for life in run["lives"]:
        ended = life["ended"]
        if ended is None and life is run["lives"][-1]:
            ended = max(_changed_at(Path(run["folder"])), default=life["started"])
        total += max(0.0, ended - life["started"]) if ended is not None else 0.0
    return round(total, 2)


def _changed_at(folder: Path) -> Iterator[float]:
    """When the files of a run folder were written. Ranks that end at this moment may still remove some of them."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            yield path.lstat().st_mtime  # not of what a link names: the user may have moved it away


def _read(folder: Path) -> Run | None:
    try:
        return read_run(folder)
    except ConfigError:
        return None
