"""The failure report: which rank failed first, why, where, and how to go on. As JSON and as one screen."""

import json
import os
import re
import shlex
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_FAILED, EXIT_HANG, EXIT_KILLED, path_value
from lockstep.failures.causes import explain_exception, explain_exit, is_consequence, silent_rank
from lockstep.failures.watched_rank import MonitorOptions, WatchedRank
from lockstep.files import write_whole


def way_on(folder: Path | None, first: WatchedRank, options: MonitorOptions) -> dict[str, Any]:
    """The part `run` of a failure report. first: the rank that failed first."""
    step = first.position()["step"]
    newest, saved_step = first.resumed_from, first.resumed_step
    # A snapshot of a later step than the rank's was passed over as damaged.
    own = None if folder is None else newest_snapshot(folder, up_to=None if newest is None else max(step, saved_step))
    if own is not None:
        newest, saved_step = str(own), _step_of(own)
    return {
        "folder": None if folder is None else str(folder),
        "newest_snapshot": newest,
        "steps_lost": max(0, step - saved_step),
        "resume": resume_command(options.command, folder),
        "time": time.time() - first.clock_ahead,
    }


def newest_snapshot(run_dir: Path, up_to: int | None = None) -> Path | None:
    """The newest numbered snapshot that is written whole: its companion exists. up_to: the last step that counts."""
    numbered = [path for path in run_dir.glob("snapshots/step_*.pt") if re.fullmatch(r"step_\d+", path.stem)]
    whole = [path for path in numbered if path.with_suffix(".json").exists()]
    return max((path for path in whole if up_to is None or _step_of(path) <= up_to), default=None)


def resume_command(words: list[str], folder: Path | None) -> str:
    """The command that goes on in the same run folder, or in the same folder of a sweep."""
    if not words or folder is None:
        return ""
    script = next((index for index, word in enumerate(words) if word.endswith("train.py")), 0)
    is_sweep = bool({"-m", "--multirun"} & set(words[script:]))
    if is_sweep:
        added = [f"hydra.sweep.dir={path_value(folder.parent)}", "sweep.retry=failed"]
    else:
        added = [f"hydra.run.dir={path_value(folder)}"]
    keys = tuple(f"{word.partition('=')[0]}=" for word in added)
    return shlex.join([*(word for word in words if not word.startswith(keys)), *added])


def _step_of(snapshot: Path) -> int:
    return int(snapshot.stem.removeprefix("step_"))


LINES, COLUMNS = 40, 160
HANG_ROWS = 18  # of the table, with its header and the number of ranks that are left out
LOG_LINES, CONSEQUENCES, SAMPLES, STACK_LINES = 8, 6, 12, 8
RAISED_BY_ALL = ("config", "diverged", "different")  # kinds that all ranks raise alike; the message says what to type


def screen(report: Mapping[str, Any]) -> str:
    """At most 40 lines. The keys of `report` are those of failure.json."""
    first = report["first"]
    if first["kind"] == "config":
        return f"lockstep: {first['message']}"
    lines = _raised_by_all(report) if first["kind"] in RAISED_BY_ALL else _failure_of_one(report)
    lines += _repeated(report.get("repeated"))
    alike = f"{first['type']}: {first['message']}" if first["kind"] in RAISED_BY_ALL else None
    lines += _others([other for other in report["consequences"] if other["what"] != alike])
    lines += _run(report["run"])
    spare = LINES - len(lines) - 1
    lines[_run_start(lines) : _run_start(lines)] = _log(first, min(LOG_LINES, spare))
    return "\n".join(map(_shortened, lines))


def _raised_by_all(report: Mapping[str, Any]) -> list[str]:
    first = report["first"]
    who = f"rank {first['rank']} of {report['world_size']} ({first['host']}, pid {first['pid']})"
    return [f"lockstep: {first['message']}", f"  raised by all ranks, first by {who}{_position(first)}"]


def _failure_of_one(report: Mapping[str, Any]) -> list[str]:
    first, lines = report["first"], [headline(report)]
    lines += [f"  {line}" for line in (*_what(first), *_where(first), *_samples(first.get("samples", [])))]
    for line in (f"what it means: {first['meaning']}", f"what to do: {first['advice']}"):
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent="  ", break_long_words=False)
    return lines


def _shortened(line: str) -> str:
    is_whole = len(line) <= COLUMNS or line.startswith(("lockstep: ", "resume: ", "run folder: ", "newest snapshot: "))
    return line if is_whole else f"{line[: COLUMNS - 3]}..."


def headline(report: Mapping[str, Any]) -> str:
    """lockstep: rank 1 of 2 failed first (host, pid 123), in epoch 2, after step 37, in evaluation"""
    first = report["first"]
    what = "hangs" if first["kind"] == "hang" else "failed first"
    if first.get("ended_by_gloo"):
        what = "makes other collective calls"
    who = f"rank {first['rank']} of {report['world_size']} {what} ({first['host']}, pid {first['pid']})"
    if first.get("ranks") == []:
        who = f"the {report['world_size']} ranks wait ({first['host']})"
    return f"lockstep: {who}{_position(first)}"


def _position(first: Mapping[str, Any]) -> str:
    epoch = f", in epoch {first['epoch']}, after step {first['step']}" if first["epoch"] else ""
    return f"{epoch}, in the phase {first['phase']}"


def _what(first: Mapping[str, Any]) -> list[str]:
    if "table" in first:
        seen = f"no rank has made progress for {first['silent_seconds']:.0f} s"
        if first["ended_by_gloo"]:
            seen = f"gloo ends rank {', '.join(map(str, first['ended_by_gloo']))}, which receives more than it expects"
        return [seen, *first["table"][:HANG_ROWS], f"verdict: {first['verdict']}"]
    if "type" in first:
        message = [line for line in first["message"].splitlines() if line.strip()][:4]
        return [f"{first['type']}: {message[0] if message else ''}", *message[1:]]
    stack = [line.strip() for line in first.get("stack", []) if line.strip()][:STACK_LINES]
    return [
        f"it ended: {first.get('signal', first['kind'])}" if first["kind"] != "silent" else "it did not answer",
        *stack,
    ]


def _where(first: Mapping[str, Any]) -> list[str]:
    if "file" not in first:
        return []
    lines = [f"at {_shown(first['file'])}:{first['line']} in {first['function']}: {first['code']}"]
    lines += [f"  {name}: {text}" for name, text in list(first.get("operands", {}).items())[:5]]
    return lines


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _samples(samples: Sequence[int]) -> list[str]:
    if not samples:
        return []
    more = f", ... ({len(samples)} in all)" if len(samples) > SAMPLES else ""
    return [f"its batch held the samples {', '.join(map(str, samples[:SAMPLES]))}{more}"]


def _repeated(repeated: Mapping[str, Any] | None) -> list[str]:
    if repeated is None:
        return []
    if repeated["will_fail_again"]:
        return ["the attempt before ended with the same failure at the same step: it will fail again"]
    if repeated["same_failure"]:
        moved = "the run made progress in between" if repeated["moved"] else "no cause in the code is known"
        return [f"the attempt before ended with the same failure, and {moved}: a restart may pass"]
    return ["the attempt before ended with another failure: a restart may pass"]


def _others(consequences: Sequence[Mapping[str, Any]]) -> list[str]:
    if not consequences:
        return []
    lines = ["consequences:"]
    for other in consequences[:CONSEQUENCES]:
        where = f"rank {other['rank']} ({other['host']}, pid {other['pid']})"
        lines.append(f"  {where} {other['seconds_later']:.2f} s later: {other['what']}")
    if len(consequences) > CONSEQUENCES:
        lines.append(f"  and {len(consequences) - CONSEQUENCES} other ranks")
    return lines


def _run_start(lines: Sequence[str]) -> int:
    return next(index for index, line in enumerate(lines) if line.startswith("run folder: "))


def _log(first: Mapping[str, Any], count: int) -> list[str]:
    if not first.get("log") or count < 3:
        return [] if not first.get("log") else [f"its log: {_shown(first['log'])}"]
    shown = first["log_lines"][-(count - 1) :]
    return [f"its log, {_shown(first['log'])}, ends with:", *(f"  {line}" for line in shown)]


def _run(run: Mapping[str, Any]) -> list[str]:
    lines = [f"run folder: {run['folder'] or 'none yet'}"]
    if run["newest_snapshot"]:
        lines.append(f"newest snapshot: {run['newest_snapshot']}; steps lost: {run['steps_lost']}")
    else:
        lines.append(f"newest snapshot: none; steps lost: {run['steps_lost']}")
    if run["resume"]:
        lines.append(f"resume: {run['resume']}")
    return lines


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
                contents = f"{text}\n".encode(errors="backslashreplace")  # a path may hold any bytes
                write_whole(self.run_dir / name, contents, sync=False)
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
