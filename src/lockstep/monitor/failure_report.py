"""The failure report: which rank failed first, why, where, and how to go on. As JSON and as one screen."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_FAILED, EXIT_HANG, EXIT_KILLED
from lockstep.files import write_whole
from lockstep.monitor.death_causes import explain_exception, explain_exit, is_consequence, silent_rank
from lockstep.monitor.options import MonitorOptions
from lockstep.monitor.report_screen import screen
from lockstep.monitor.watched_rank import WatchedRank
from lockstep.monitor.way_on import way_on

SCHEMA = 1  # of failure.json
OTHER_MACHINE_SECONDS = 2.0  # for the report of the machine on which a rank failed first
EXIT_CODES = {"config": EXIT_CONFIG, "diverged": EXIT_DIVERGED, "exception": EXIT_FAILED, "silent": EXIT_HANG}
EXIT_CODES |= {"different": EXIT_FAILED, "hang": EXIT_HANG, "killed": EXIT_KILLED, "left": EXIT_KILLED}
EXCEPTION_KEYS = ("kind", "type", "message", "is_local", "file", "line", "function", "code", "operation", "operands",
                  "phase", "samples")  # fmt: skip
HANG_KEYS = ("kind", "verdict", "ranks", "meaning", "advice", "table", "silent_seconds", "ended_by_gloo")


@dataclass(frozen=True)
class FailureReport:
    """contents: see `docs/failures.md` for each key."""

    contents: dict[str, Any]
    run_dir: Path | None

    @property
    def kind(self) -> str:
        """config, diverged, different, exception, killed, left, silent or hang."""
        return str(self.contents["first"]["kind"])

    @property
    def is_consequence(self) -> bool:
        """Whether it only tells that a rank of another machine is gone or silent."""
        return is_consequence(self.contents["first"])

    def is_earlier_than(self, other: "FailureReport") -> bool:
        """Whether both ranks failed by themselves, this one first. A hang has a verdict, whatever the time."""
        if self.is_consequence or {self.kind, other.kind} - {"exception", "killed", "left"}:
            return False
        return bool(self.contents["first"]["time"] < other.contents["first"]["time"])

    def screen(self) -> str:
        """At most 40 lines."""
        return screen(self.contents)

    def as_dict(self) -> dict[str, Any]:
        return {"contents": self.contents, "screen": self.screen()}

    def write(self) -> None:
        """failure.json and failure.txt in the run folder. A folder that cannot be written to costs the files only."""
        if self.run_dir is None or self.kind == "config":
            return
        for name, text in (("failure.json", json.dumps(self.contents, indent=1)), ("failure.txt", self.screen())):
            try:
                write_whole(self.run_dir / name, f"{text}\n")
            except OSError:
                return


def build_report(ranks: Sequence[WatchedRank], run_dir: str | None, options: MonitorOptions) -> FailureReport | None:
    """The report of a run whose ranks have reported how they end, or have ended. None if none of them failed."""
    failed = [rank for rank in ranks if rank.has_failed]
    if not failed:
        return None
    first = first_failure(ranks, failed)
    folder = None if run_dir is None else Path(run_dir)
    contents: dict[str, Any] = {
        "schema": SCHEMA,
        "first": _first(first),
        "consequences": [_consequence(rank, first) for rank in ranks if rank is not first and rank.has_failed],
        "world_size": first.hello["world_size"],
        "run": way_on(folder, first, options),
    }
    previous = None if folder is None else read_report(folder)
    contents["repeated"] = compare_attempts(previous, contents, options.attempt)
    contents["exit_code"] = EXIT_CODES[contents["first"]["kind"]]
    return FailureReport(contents, folder)


def write_report(
    ranks: Sequence[WatchedRank], run_dir: str | None, options: MonitorOptions, since: float
) -> FailureReport | None:
    """Build the report and write it into the run folder.

    The report of another machine is better if this one is about a lost rank, or if a rank failed there before, by rank
    0's clock. since: when the run started, in seconds since 1970.
    """
    report = build_report(ranks, run_dir, options)
    if report is None:
        return None
    has_other_machines = len(ranks) < int(ranks[0].hello["world_size"])
    if report.run_dir is not None and has_other_machines:
        seconds = OTHER_MACHINE_SECONDS if report.is_consequence else 0.0
        other = report_of_another_machine(report.run_dir, since - ranks[0].clock_ahead, seconds)
        if other is not None and (report.is_consequence or other.is_earlier_than(report)):
            other.contents["run"]["resume"] = report.contents["run"]["resume"]  # this machine's own command
            return other
    report.write()
    return report


def report_of_another_machine(folder: Path, since: float, seconds: float) -> FailureReport | None:
    """The report that the monitor of another machine writes into the run folder within `seconds`.

    since: when the run started, in seconds since 1970. An older report is that of an earlier start.
    """
    deadline = time.monotonic() + seconds
    while True:
        contents = read_report(folder)
        if contents is not None and contents["run"]["time"] >= since:
            return FailureReport(contents, folder)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)


def first_failure(ranks: Sequence[WatchedRank], failed: Sequence[WatchedRank]) -> WatchedRank:
    """The rank that failed first. An error about a lost rank comes after the loss, whatever its time."""
    for rank in failed:
        if rank.is_cause_of_hang:
            return rank
    silent = [rank for rank in failed if rank.killed_by_monitor and rank.failure is None]
    causes = [rank for rank in failed if not is_consequence(rank.failure) and rank not in silent]
    if causes:
        return min(causes, key=lambda rank: rank.failed_at)
    for rank in sorted(failed, key=lambda rank: rank.failed_at):
        blamed = silent_rank(rank.failure["message"]) if rank.failure else None
        for other in ranks:
            if other.rank == blamed:
                return other
    return min(failed, key=lambda rank: rank.failed_at)


def _identity(rank: WatchedRank) -> dict[str, Any]:
    return {key: rank.hello[key] for key in ("rank", "host", "pid")}


def _first(rank: WatchedRank) -> dict[str, Any]:
    described = _identity(rank) | rank.position() | {"log": rank.log, "log_lines": rank.log_lines()}
    failure = rank.failure
    if failure is not None and rank.is_cause_of_hang:
        return described | {key: failure[key] for key in HANG_KEYS} | {"time": rank.failed_at_time_of_day}
    if failure is not None and not (is_consequence(failure) and rank.killed_by_monitor):
        meaning, advice = explain_exception(failure["type"], failure["message"], failure["is_local"])
        described |= {key: failure[key] for key in EXCEPTION_KEYS if key in failure}
        return described | {"time": rank.failed_at_time_of_day, "meaning": meaning, "advice": advice}
    if rank.killed_by_monitor or rank.died_at is None:
        meaning = "it did not answer the other ranks within backend.timeout"
        advice = "its stack above shows where it was; type backend.timeout=<more seconds> if it was only slow"
        return described | {"kind": "silent", "meaning": meaning, "advice": advice, "stack": rank.stack()}
    name, meaning, advice = explain_exit(rank.exit_code, rank.out_of_memory, rank.page.phase)
    kind = "left" if rank.exit_code is not None and rank.exit_code >= 0 else "killed"
    described |= {"kind": kind, "signal": name, "exit_code": rank.exit_code, "time": rank.failed_at_time_of_day}
    return described | {"meaning": meaning, "advice": advice, "stack": rank.stack()}


def _consequence(rank: WatchedRank, first: WatchedRank) -> dict[str, Any]:
    if first.is_cause_of_hang:
        what = "was ended"
    elif rank.failure is not None:
        what = f"{rank.failure['type']}: {rank.failure['message'].splitlines()[0] if rank.failure['message'] else ''}"
    elif rank.killed_by_monitor:
        what = "did not end by itself, and was killed"
    else:
        what = f"ended ({explain_exit(rank.exit_code, rank.out_of_memory, rank.page.phase)[0]})"
    return _identity(rank) | {"seconds_later": round(max(0.0, rank.failed_at - first.failed_at), 3), "what": what}


def read_report(folder: Path) -> dict[str, Any] | None:
    """What failure.json in the run folder holds."""
    try:
        previous = json.loads((folder / "failure.json").read_text())
    except (OSError, ValueError):
        return None
    return previous if isinstance(previous, dict) and previous.get("schema") == SCHEMA else None


def remove_report(folder: str) -> None:
    """Delete the report of an earlier attempt. A run that has finished does not need it."""
    for name in ("failure.json", "failure.txt"):
        with suppress(OSError):
            Path(folder, name).unlink(missing_ok=True)


def compare_attempts(before: dict[str, Any] | None, now: dict[str, Any], attempt: int) -> dict[str, Any] | None:
    """Whether this is the failure of the attempt before, and whether the run moved in between. None for a first one.

    The same place, type and step again: it will fail again. Otherwise a restart may pass.
    """
    if before is None:
        return None
    is_same = _fingerprint(before["first"]) == _fingerprint(now["first"])
    moved = now["first"]["step"] > before["first"]["step"]
    is_of_code = now["first"]["kind"] in ("exception", "diverged", "different", "hang")
    return {
        "same_failure": is_same,
        "moved": moved,
        "will_fail_again": is_same and not moved and is_of_code,
        "attempt": attempt,
    }


def _fingerprint(first: dict[str, Any]) -> tuple[Any, ...]:
    """What two failures have in common that are the same one. The meaning of a hang names the line and the ranks."""
    keys = ("kind", "type", "file", "line", "signal", *(("meaning",) if first["kind"] == "hang" else ()))
    return tuple(first.get(key) for key in keys)
