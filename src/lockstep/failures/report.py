"""The failure report: which rank failed first, why, where, and how to go on. As JSON and as one screen."""

import json
import os
import re
import shlex
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_FAILED, EXIT_HANG, EXIT_KILLED, path_value
from lockstep.failures.causes import explain_exception, explain_exit, first_failure, is_consequence
from lockstep.failures.watched_rank import WatchedRank
from lockstep.files import write_whole

SCHEMA = 2  # of failure.json
OTHER_MACHINE_SECONDS = 2.0  # for the report of the machine on which a rank failed first
EXIT_CODES = {"config": EXIT_CONFIG, "diverged": EXIT_DIVERGED, "exception": EXIT_FAILED, "silent": EXIT_HANG}
EXIT_CODES |= {"different": EXIT_FAILED, "hang": EXIT_HANG, "killed": EXIT_KILLED, "left": EXIT_KILLED}
RAISED_BY_ALL = ("config", "diverged", "different")  # kinds that all ranks raise alike; the message says what to type
EXCEPTION_KEYS = ("kind", "type", "message", "is_communication", "file", "line", "function", "code", "operation",
                  "operands", "phase", "samples")  # fmt: skip
HANG_KEYS = ("kind", "verdict", "ranks", "meaning", "advice", "table", "stacks", "silent_seconds")

LINES, COLUMNS = 40, 160  # of the screen
HANG_ROWS = 18  # of the table, with its header and the number of ranks that are left out
LOG_LINES, CONSEQUENCES, SAMPLES, STACK_LINES = 8, 6, 12, 8


@dataclass
class MonitorOptions:
    """What the monitor has to know of how its ranks were started. Values of JSON, which it reads from its stdin.

    is_foreign: another program has started the ranks, so the monitor prints the report, and ends by itself.
    is_printed_by_rank: a rank that was started alone prints the report.
    agent: torchrun's pid.
    command: the typed words.
    temporary_folder: what the monitor removes if the launcher is killed.
    attempt: restarts so far.
    """

    is_foreign: bool = False
    is_printed_by_rank: bool = False
    agent: int | None = None
    command: list[str] = field(default_factory=list)
    temporary_folder: str | None = None
    attempt: int = 0


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
        """Whether it may only tell that a rank of another machine is lost."""
        return is_consequence(self.contents["first"])

    def is_earlier_than(self, other: "FailureReport") -> bool:
        """Whether both ranks failed by themselves, this one first. A hang has a verdict, whatever the time."""
        if self.is_consequence or {self.kind, other.kind} - {"exception", "killed", "left"}:
            return False
        return bool(self.contents["first"]["time"] < other.contents["first"]["time"])

    def screen(self) -> str:
        """At most 40 lines."""
        return _screen(self.contents)

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


def write_report(
    ranks: Sequence[WatchedRank],
    run_dir: str | None,
    options: MonitorOptions,
    since: float,
    backend_timeout: float | None = None,
) -> FailureReport | None:
    """Build the report and write it into the run folder. None if no rank has failed.

    The report of another machine is better if this one may be about a lost rank, or if a rank failed there before, by
    rank 0's clock. since: when the run started, in seconds since 1970.
    """
    report = build_report(ranks, run_dir, options, since, backend_timeout)
    if report is None:
        return None
    if report.run_dir is not None and len(ranks) < int(ranks[0].hello["world_size"]):
        deadline = time.monotonic() + (OTHER_MACHINE_SECONDS if report.is_consequence else 0.0)
        contents = read_report(report.run_dir)
        # An older report is that of an earlier start.
        while contents is None or contents["run"]["time"] < since - ranks[0].clock_ahead:
            contents = None
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
            contents = read_report(report.run_dir)
        other = None if contents is None else FailureReport(contents, report.run_dir)
        if other is not None and (report.is_consequence or other.is_earlier_than(report)):
            other.contents["run"]["resume"] = report.contents["run"]["resume"]  # this machine's own command
            return other
    report.write()
    return report


def build_report(
    ranks: Sequence[WatchedRank],
    run_dir: str | None,
    options: MonitorOptions,
    since: float,
    backend_timeout: float | None = None,
) -> FailureReport | None:
    """The report of ranks that have reported how they end, or have ended. None if none of them has failed.

    since: when this attempt began, in seconds since 1970. A newer report in the run folder is another machine's of this
    attempt, and says nothing of the attempt before.
    """
    first = first_failure(ranks, backend_timeout)
    if first is None:
        return None
    folder = None if run_dir is None else Path(run_dir)
    contents: dict[str, Any] = {
        "schema": SCHEMA,
        "first": _first(first),
        "consequences": [_consequence(rank, first) for rank in ranks if rank is not first and rank.has_failed],
        "world_size": first.hello["world_size"],
        "run": resume_hint(folder, first, options),
    }
    before = None if folder is None else read_report(folder)
    if before is not None and before["run"]["time"] >= since - first.clock_ahead:
        before = None
    contents["repeated"] = compare_attempts(before, contents, options.attempt)
    contents["exit_code"] = EXIT_CODES[contents["first"]["kind"]]
    return FailureReport(contents, folder)


def _identity(rank: WatchedRank) -> dict[str, Any]:
    return {key: rank.hello[key] for key in ("rank", "host", "pid")}


def _first(rank: WatchedRank) -> dict[str, Any]:
    described = _identity(rank) | rank.position() | {"log": rank.log, "log_lines": rank.log_lines()}
    described["time"] = rank.failed_at_time_of_day
    failure = rank.failure
    if failure is not None and rank.is_cause_of_hang:
        return described | {key: failure[key] for key in HANG_KEYS}
    if failure is not None and not (is_consequence(failure) and rank.killed_by_monitor):
        meaning, advice = explain_exception(failure["type"], failure["message"], failure["is_communication"])
        described |= {key: failure[key] for key in EXCEPTION_KEYS if key in failure}
        return described | {"meaning": meaning, "advice": advice}
    described["stack"] = rank.stack()
    if rank.killed_by_monitor or rank.died_at is None:
        meaning = "it did not answer the other ranks within backend.timeout"
        advice = "see its log for what it did; type backend.timeout=<more seconds> if it was only slow"
        return described | {"kind": "silent", "meaning": meaning, "advice": advice}
    name, meaning, advice = explain_exit(rank)
    kind = "left" if rank.exit_code is not None and rank.exit_code >= 0 else "killed"
    described |= {"kind": kind, "signal": name, "exit_code": rank.exit_code}
    return described | {"meaning": meaning, "advice": advice}


def _consequence(rank: WatchedRank, first: WatchedRank) -> dict[str, Any]:
    if first.is_cause_of_hang:
        what = "was ended"
    elif rank.failure is not None:
        what = f"{rank.failure['type']}: {rank.failure['message'].partition(chr(10))[0]}"
    elif rank.killed_by_monitor:
        what = "did not end by itself, and was killed"
    else:
        what = f"ended ({explain_exit(rank)[0]})"
    return _identity(rank) | {"seconds_later": round(max(0.0, rank.failed_at - first.failed_at), 3), "what": what}


def read_report(folder: Path) -> dict[str, Any] | None:
    """What failure.json in the run folder holds."""
    try:
        previous = json.loads((folder / "failure.json").read_text())
    except (OSError, ValueError):
        return None
    return previous if isinstance(previous, dict) and previous.get("schema") == SCHEMA else None


def remove_report(folder: str, since: float) -> None:
    """Delete the report of an earlier attempt. A run that has finished does not need it.

    since: when this attempt began, in seconds since 1970. What it has written of a hang that passed stays.
    """
    for path in (Path(folder, name) for name in ("failure.json", "failure.txt")):
        with suppress(OSError):
            path.unlink(missing_ok=True)
    for path in (Path(folder, "hang.txt"), *Path(folder, "logs").glob("hang_of_rank*.json")):
        with suppress(OSError):
            if path.stat().st_mtime < since:
                path.unlink()


def compare_attempts(before: dict[str, Any] | None, now: dict[str, Any], attempt: int) -> dict[str, Any] | None:
    """Whether this is the failure of the attempt before, and whether the run moved in between. None for a first one.

    The same place, type and step again: it will fail again. Otherwise a restart may pass.
    """
    if before is None:
        return None
    first, first_before = now["first"], before["first"]
    # The meaning of a hang names the line and the ranks.
    keys = ("kind", "type", "file", "line", "signal", *(("meaning",) if first["kind"] == "hang" else ()))
    is_same = all(first.get(key) == first_before.get(key) for key in keys)
    moved = first["step"] > first_before["step"]
    is_of_code = first["kind"] in ("exception", "diverged", "different", "hang")
    will_fail_again = is_same and not moved and is_of_code
    return {"same_failure": is_same, "moved": moved, "will_fail_again": will_fail_again, "attempt": attempt}


# How to go on.


def resume_hint(folder: Path | None, first: WatchedRank, options: MonitorOptions) -> dict[str, Any]:
    """The part `run` of a report: the newest snapshot, the steps that are lost, the command that goes on.

    first: the rank that failed first.
    """
    step, newest, saved_step = first.position()["step"], first.resumed_from, first.resumed_step
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


def _step_of(snapshot: Path) -> int:
    return int(snapshot.stem.removeprefix("step_"))


def resume_command(words: list[str], folder: Path | None) -> str:
    """The command that goes on in the same run folder, or in the same folder of a sweep."""
    if not words or folder is None:
        return ""
    script = next((index for index, word in enumerate(words) if word.endswith("train.py")), 0)
    if {"-m", "--multirun"} & set(words[script:]):
        added = [f"hydra.sweep.dir={path_value(folder.parent)}", "sweep.retry=failed"]
    else:
        added = [f"hydra.run.dir={path_value(folder)}"]
    keys = tuple(f"{word.partition('=')[0]}=" for word in added)
    return shlex.join([*(word for word in words if not word.startswith(keys)), *added])


# The screen.


def _screen(report: Mapping[str, Any]) -> str:
    """At most 40 lines: what failed, what it means, what to type; what followed; the log; where the run is."""
    first, run = report["first"], report["run"]
    if first["kind"] == "config":
        return f"lockstep: {first['message']}"
    who = f"rank {first['rank']} of {report['world_size']}"
    process = f"({first['host']}, pid {first['pid']})"
    epoch = f", in epoch {first['epoch']}, after step {first['step']}" if first["epoch"] else ""
    position = f"{epoch}, in the phase {first['phase']}"
    consequences = report["consequences"]
    if first["kind"] in RAISED_BY_ALL:
        lines = [f"lockstep: {first['message']}", f"  raised by all ranks, first by {who} {process}{position}"]
        alike = f"{first['type']}: {first['message']}"
        consequences = [other for other in consequences if other["what"] != alike]
    else:
        happened = f"{who} {'hangs' if first['kind'] == 'hang' else 'failed first'}"
        if first.get("ranks") == []:
            happened = f"the {report['world_size']} ranks wait"
        lines = [f"lockstep: {happened} {process}{position}", *(f"  {line}" for line in _evidence(first))]
        for line in (f"what it means: {first['meaning']}", f"what to do: {first['advice']}"):
            lines += textwrap.wrap(line, COLUMNS, subsequent_indent="  ", break_long_words=False)
    if (repeated := report.get("repeated")) is not None:
        if repeated["will_fail_again"]:
            lines.append("the attempt before ended with the same failure at the same step: it will fail again")
        elif repeated["same_failure"]:
            moved = "the run made progress in between" if repeated["moved"] else "no cause in the code is known"
            lines.append(f"the attempt before ended with the same failure, and {moved}: a restart may pass")
        else:
            lines.append("the attempt before ended with another failure: a restart may pass")
    if consequences:
        lines.append("consequences:")
    for other in consequences[:CONSEQUENCES]:
        process = f"rank {other['rank']} ({other['host']}, pid {other['pid']})"
        lines.append(f"  {process} {other['seconds_later']:.2f} s later: {other['what']}")
    if len(consequences) > CONSEQUENCES:
        lines.append(f"  and {len(consequences) - CONSEQUENCES} other ranks")
    ends = [f"run folder: {run['folder'] or 'none yet'}"]
    ends.append(f"newest snapshot: {run['newest_snapshot'] or 'none'}; steps lost: {run['steps_lost']}")
    ends += [f"resume: {run['resume']}"] if run["resume"] else []
    shown = min(LOG_LINES, LINES - len(lines) - len(ends) - 1)  # lines of the log, with a title
    if first.get("log") and shown >= 3:
        title = f"its log, {_shown(first['log'])}, ends with:"
        lines += [title, *(f"  {line}" for line in first["log_lines"][-(shown - 1) :])]
    elif first.get("log"):
        lines.append(f"its log: {_shown(first['log'])}")
    is_short = {line: len(line) <= COLUMNS or line.startswith("lockstep: ") for line in lines}
    return "\n".join([*(line if is_short[line] else f"{line[: COLUMNS - 3]}..." for line in lines), *ends])


def _evidence(first: Mapping[str, Any]) -> list[str]:
    """What was seen: the table of a hang, the exception and its place, or how the process ended and its stack."""
    if "table" in first:
        silence = f"no rank has made progress for {first['silent_seconds']:.0f} s"
        return [silence, *first["table"][:HANG_ROWS], f"verdict: {first['verdict']}"]
    lines = []
    if "type" in first:
        message = [line for line in first["message"].splitlines() if line.strip()][:4]
        lines += [f"{first['type']}: {message[0] if message else ''}", *message[1:]]
    elif first["kind"] == "silent":
        lines.append("it did not answer")
    else:
        lines.append(f"it ended: {first['signal']}")
    lines += first.get("stack", [])[:STACK_LINES]
    if "file" in first:
        lines.append(f"at {_shown(first['file'])}:{first['line']} in {first['function']}: {first['code']}")
        lines += [f"  {name}: {text}" for name, text in list(first.get("operands", {}).items())[:5]]
    if samples := first.get("samples", []):
        more = f", ... ({len(samples)} in all)" if len(samples) > SAMPLES else ""
        lines.append(f"its batch held the samples {', '.join(map(str, samples[:SAMPLES]))}{more}")
    return lines


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
