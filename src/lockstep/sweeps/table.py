"""The folder of a sweep: `sweep.csv`, its table; `sweep.json`, what the sweep is; its lock; and what became of jobs
that no sweep has waited for.

The sweep's parent process alone writes the table: one row for each job, on the disk before the next job starts.
"""

import csv
import io
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.distributed.environment import SLURM_JOB_FILE, is_in_queue
from lockstep.distributed.run_folder import HeldFolder, unwritable
from lockstep.errors import RAISED_BY_ALL, ConfigError, path_value
from lockstep.failures.report import read_report
from lockstep.files import write_whole
from lockstep.runs.record import best_of, metric_on_test, read_run, seconds_of, state_of
from lockstep.source_code import source_hashes
from lockstep.text import differing

TABLE = "sweep.csv"
WAITING, RUNNING, FINISHED, FAILED, STOPPED = "waiting", "running", "finished", "failed", "stopped"
STATES = (FINISHED, RUNNING, STOPPED, WAITING, FAILED)  # in the order of a summary
SUBMITTED = "submitted, and runs elsewhere"  # the cause of a running row that this command does not wait for
REFUSED = "refused: "  # the cause of a failed row begins with it if the job would fail again: its config is wrong
OF_RUNS = {"finished": FINISHED, "paused": STOPPED, "stopped": STOPPED}  # by the state of a run; others are failures

RECORD = "sweep.json"
SCHEMA = 2
# Parts of the config that change no number of a job.
NOT_COMPARED = ("launch.", "backend.", "sweep.", "logger", "logging.", "snapshot.", "data_dir", "run_dir")
# All the same: another search does not fit the table.
COMPARED = ("sweep.search", "sweep.seed")
OF_ONE_COMMAND = ("sweep.retry=", "sweep.changes=", "hydra.sweep.dir=")  # not repeated by a resume
SHOWN = 6  # differences that a message names


@dataclass
class Row:
    """One job.

    overrides: what it changes, as words of a shell.
    folder: its run folder, inside the sweep's.
    objective: of the weights that a run has chosen, as it returns it.
    best, best_step: the best evaluation, and the step of it.
    seconds: of all its lives together.
    cause: why it is in this state, in one line.
    test: the objective's metric on the test set, as the run reports it at its end.
    """

    number: int
    overrides: str
    folder: str
    state: str = WAITING
    objective: float | None = None
    best: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    cause: str = ""
    test: float | None = None

    @property
    def values(self) -> dict[str, str]:
        """{key as typed, such as +model.kind: value as typed} of what the job changes."""
        pairs = (word.partition("=") for word in shlex.split(self.overrides))
        return {key: value for key, _, value in pairs}


COLUMNS = [field.name for field in fields(Row)]
NUMBERS: dict[str, type] = {"number": int, "objective": float, "best": float, "best_step": int, "seconds": float}
NUMBERS |= {"test": float}
ADDED = ("test",)  # columns that the table of an older sweep lacks


class SweepTable:
    """The rows of a sweep, in the order of their numbers. Each change is on the disk before the method returns.

    The methods that change it raise ConfigError if it cannot be written, as on a full disk.

    words: of the command, without what only one command says.
    resume: those that go on with the sweep.
    """

    def __init__(self, folder: Path, words: Sequence[str] = ()) -> None:
        self.folder = folder
        self.resume = [*words, f"hydra.sweep.dir={path_value(folder)}"]
        self.rows: dict[int, Row] = {row.number: row for row in read_table(folder)}

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def add(self, rows: list[Row]) -> None:
        """Add rows with new numbers."""
        self.rows |= {row.number: row for row in rows}
        self._write()

    def update(self, number: int, **values: Any) -> Row:
        """Change columns of one row."""
        row = self.rows[number]
        for name, value in values.items():
            assert name in COLUMNS, name
            setattr(row, name, value)
        self._write()
        return row

    def read_results(self, number: int) -> dict[str, Any]:
        """The columns `best`, `best_step` and `test` of a job, from its run.json. Empty without one."""
        with suppress(ConfigError):
            run = read_run(self.folder / self.rows[number].folder)
            best, step = best_of(run)
            return {"best": best, "best_step": step, "test": metric_on_test(run)}
        return {}

    def note_killed(self) -> None:
        """Write what became of the jobs that an earlier command has left as running or stopped."""
        for row in self:
            if row.state in (RUNNING, STOPPED):
                self.update(
                    row.number, **state_after_kill(row, self.folder / row.folder) | self.read_results(row.number)
                )

    def _write(self) -> None:
        """The file has the old rows or the new ones, whenever this process is killed."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(astuple, self))  # numbers in full, so that they are read back with the same bits
        path = self.folder / TABLE
        try:
            write_whole(path, text.getvalue())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}); free some space there, then type "
                f"-m {shlex.join(self.resume)}"
            ) from None


def read_table(folder: Path) -> list[Row]:
    """The rows of a sweep folder's table; none if it has no table. Raises ConfigError for a file that is no table."""
    path = folder / TABLE
    if not path.exists():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return [_row(cells) for cells in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not the table of a sweep ({error}); type hydra.sweep.dir=<another folder>"
        ) from None


def _row(cells: dict[str, str]) -> Row:
    values: dict[str, Any] = {name: cells.get(name, "") if name in ADDED else cells[name] for name in COLUMNS}
    for name, kind in NUMBERS.items():
        values[name] = kind(values[name]) if values[name] else None
    if values["state"] not in STATES:
        raise ValueError(f"state {values['state']}")
    return Row(**values)


def lock_sweep(folder: Path) -> HeldFolder:
    """Lock the folder of a sweep, which is created if it is missing. The kernel releases it when this process ends.

    Raises ConfigError if another sweep holds it, or if it cannot be written to.
    """
    if (folder / "train.log").exists() or (folder / "snapshots").exists():
        raise ConfigError(f"{folder} is the folder of a run, not of a sweep; type hydra.sweep.dir=<another folder>")
    held = HeldFolder(folder, "sweep")
    problem = held.lock()
    if problem is not None:
        raise ConfigError(problem)
    return held


def write_sweep_record(
    folder: Path,
    arguments: Sequence[str],
    config: Mapping[str, Any],
    modules: Mapping[str, str],
    accept_changes: bool,
) -> None:
    """Write `sweep.json`, which says what the sweep in `folder` is.

    arguments: the words after `src/train.py`.
    config: the flat config of a job without what the sweep varies. Some of its keys are left out.
    modules: {module: hash} of the user's modules that the jobs import.
    Raises ConfigError if the sweep was begun with another base config or other code, but with `accept_changes`, and if
    the file cannot be written, as on a full disk. A sweep without rows has no job that could differ. A module of the
    user's that only one of the two commands imports is no difference: the jobs of a longer list may need it.
    """
    compared = {key: value for key, value in config.items() if key in COMPARED or not key.startswith(NOT_COMPARED)}
    data = {
        "schema": SCHEMA,
        "arguments": [word for word in arguments if not word.startswith(OF_ONE_COMMAND)],
        "config": compared,
        # What conf/ says is in the config.
        "code": {file: digest for file, digest in source_hashes().items() if file.endswith(".py")},
        "modules": modules,
    }
    record = json.loads(json.dumps(data, default=str))  # as it is read back
    if read_table(folder):
        before = read_sweep_record(folder)
        if before is None:
            raise ConfigError(f"{folder} has no {RECORD}, so it cannot go on; type hydra.sweep.dir=<another folder>")
        changes = differing(before["config"], record["config"], "nothing")
        differences = [f"{key} ({then} then, {now} now)" for key, (then, now) in changes.items()]
        differences += [f"the code of {file}" for file in differing(before["code"], record["code"])]
        changed_modules = differing(before["modules"], record["modules"])
        differences += [f"the code of {name}" for name, hashes in changed_modules.items() if None not in hashes]
        if differences and not accept_changes:
            more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
            raise ConfigError(
                f"the sweep in {folder} was begun with another config or other code: "
                f"{'; '.join(differences[:SHOWN])}{more}; "
                f"type hydra.sweep.dir=<another folder>, or sweep.changes=accept to go on with what is there now"
            )
    try:
        write_whole(folder / RECORD, json.dumps(record, indent=1))
    except OSError as error:
        raise ConfigError(unwritable(folder, error, "hydra.sweep.dir")) from None


def read_sweep_record(folder: Path) -> dict[str, Any] | None:
    """What `sweep.json` holds; None without one."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None


def state_after_kill(row: Row, folder: Path) -> dict[str, Any]:
    """New values for a row that an earlier command has left as running or stopped: its sweep was killed, or its job
    runs in Slurm, which may have started it again since.

    folder: the job's run folder.
    """
    job, run = None, None
    with suppress(OSError):
        job = (folder / SLURM_JOB_FILE).read_text().strip()
    with suppress(ConfigError):
        run = read_run(folder)
    if job is not None and is_in_queue(job):  # also if the sweep ended before it could write so
        return {"state": RUNNING, "cause": SUBMITTED}
    seconds = 0.0 if run is None else seconds_of(run)  # of its lives; the row has those whose end a sweep has seen
    if job is None:
        cause = "no job of it is left in Slurm" if row.cause == SUBMITTED else "the sweep was killed"
        new = {"state": STOPPED, "cause": cause, "seconds": max(row.seconds, seconds)}
        return {} if row.state == STOPPED else new
    state = FAILED if run is None else OF_RUNS.get(state_of(run), FAILED)
    cause = ""
    if state == FAILED:
        reported = "" if run is None else reported_cause(folder, run["lives"][-1]["started"])
        cause = reported or f"Slurm job {job} has ended, see slurm-{job}.out"
    objective = best_of(run)[0] if run is not None and state == FINISHED else None
    return {"state": state, "objective": objective, "seconds": seconds, "cause": cause}


def reported_cause(run_dir: Path, since: float, was_killed: bool = False) -> str:
    """What a failure report in the run folder says, in one line: "rank 1 of 2: RuntimeError: mat1 and mat2 ...".

    Empty without one newer than `since`.
    since: in seconds since 1970.
    was_killed: this process knows by which signal, and the report does not; only the verdict on a hang is better.
    """
    report = read_report(run_dir)
    if report is None or report["run"]["time"] < since or (was_killed and "verdict" not in report["first"]):
        return ""
    first = report["first"]
    if first["kind"] in RAISED_BY_ALL:
        return str(first["message"])
    what = f"hangs: {first['verdict']}" if "verdict" in first else str(first.get("signal") or first["kind"])
    if first["kind"] == "killed":
        what = f"{what}: {first['meaning']}"
    if "type" in first:
        what = f"{first['type']}: {next(iter(first['message'].splitlines()), '')}"
    return f"rank {first['rank']} of {report['world_size']}: {what}"
