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

from lockstep.errors import KIND_CODES, RAISED_BY_ALL, path_value
from lockstep.failures.causes import explain_exception, explain_exit, first_to_fail, is_consequence
from lockstep.failures.monitored_rank import MonitoredRank
from lockstep.files import write_whole

SCHEMA = 3  # of failure.json
OTHER_MACHINE_SECONDS = 2.0  # for the report of the machine on which a rank failed first
FILES = ("failure.json", "failure.txt", "hang.txt")  # in the run folder

LINES, COLUMNS = 40, 160  # of the screen
HANG_ROWS = 18  # of the table, with its header and the number of ranks that are left out
LOG_LINES, CONSEQUENCES, SAMPLES, STACK_LINES = 8, 6, 12, 8


@dataclass
class MonitorOptions:
    """What the monitor has to know of how its ranks were started. Values of JSON, which it reads from its stdin.

    agent: torchrun's pid, if it ends when these ranks have ended.
    command: the typed words.
    temporary_folder: what the monitor removes if the launcher is killed.
    """

    agent: int | None = None
    command: list[str] = field(default_factory=list)
    temporary_folder: str | None = None


Report = dict[str, Any]
"""What failure.json holds, see `docs/failures.md` for each key."""


def write_report(
    ranks: Sequence[MonitoredRank], run_dir: str | None, options: MonitorOptions, before: Report | None
) -> Report | None:
    """The report of ranks that have reported how they end, or have ended, also as files in the run folder.

    Where it may only tell that a rank of another machine is lost, it is the report of that machine, if that comes soon.
    before: the report of an earlier start. Returns None if no rank has failed.
    """
    first = first_to_fail(ranks)
    if first is None:
        return None
    report: Report = {
        "schema": SCHEMA,
        "first": _first(first),
        "consequences": [_consequence(rank, first) for rank in ranks if rank is not first and rank.has_failed],
        "world_size": first.hello["world_size"],
        "run": resume_hint(None if run_dir is None else Path(run_dir), first, options.command),
    }
    report["will_fail_again"] = will_fail_again(before, report)
    report["exit_code"] = KIND_CODES[report["first"]["kind"]]
    if run_dir is None or report["first"]["kind"] == "config":
        return report
    if is_consequence(report["first"]) and len(ranks) < first.hello["world_size"]:
        deadline = time.monotonic() + OTHER_MACHINE_SECONDS
        earlier = None if before is None else before["run"]["time"]
        while (others := read_report(Path(run_dir))) is None or others["run"]["time"] == earlier:
            if time.monotonic() > deadline:
                others = None
                break
            time.sleep(0.02)
        if others is not None:
            others["run"]["resume"] = report["run"]["resume"]  # this machine's own command
            return others
    with suppress(OSError):  # a folder that cannot be written to costs the files only
        for name, text in (("failure.json", json.dumps(report, indent=1)), ("failure.txt", screen(report))):
            # A path may hold any bytes.
            write_whole(Path(run_dir, name), f"{text}\n".encode(errors="backslashreplace"), sync=False)
    return report


def _identity(rank: MonitoredRank) -> dict[str, Any]:
    return {key: rank.hello[key] for key in ("rank", "host", "pid")}


def _first(rank: MonitoredRank) -> dict[str, Any]:
    described = _identity(rank) | rank.position() | {"log": rank.log, "log_lines": rank.log_lines()}
    described |= rank.failure or {"stack": rank.stack()}
    described["time"] = time.time() - time.monotonic() + rank.failed_at
    if rank.is_cause_of_hang:
        return described
    if rank.failure is not None:
        meaning, advice = explain_exception(rank.failure)
    else:
        name, meaning, advice = explain_exit(rank)
        kind = "left" if rank.exit_code is not None and rank.exit_code >= 0 else "killed"
        described |= {"kind": kind, "signal": name, "exit_code": rank.exit_code}
    return described | {"meaning": meaning, "advice": advice}


def _consequence(rank: MonitoredRank, first: MonitoredRank) -> dict[str, Any]:
    if first.is_cause_of_hang:
        what = "was ended"
    elif rank.failure is not None:
        what = f"{rank.failure['type']}: {rank.failure['message'].partition(chr(10))[0]}"
    elif rank.killed_by_monitor:
        what = "did not end by itself, and was killed"
    else:
        what = f"ended ({explain_exit(rank)[0]})"
    return _identity(rank) | {"seconds_later": round(max(0.0, rank.failed_at - first.failed_at), 3), "what": what}


def read_report(folder: Path) -> Report | None:
    """What failure.json in the run folder holds."""
    try:
        contents = json.loads((folder / "failure.json").read_text())
    except (OSError, ValueError):
        return None
    return contents if isinstance(contents, dict) and contents.get("schema") == SCHEMA else None


def remove_report(folder: Path) -> None:
    """The report of an earlier start, of a run that has ended without a failure now."""
    with suppress(OSError):
        for name in FILES:
            (folder / name).unlink(missing_ok=True)


def will_fail_again(before: Report | None, now: Report) -> bool:
    """Whether the start before ended with the same failure, at the same place and step, and a restart cannot pass."""
    if before is None:
        return False
    first, first_before = now["first"], before["first"]
    # The meaning of a hang names the line and the ranks.
    keys = ("kind", "type", "file", "line", "step", *(("meaning",) if first["kind"] == "hang" else ()))
    is_of_code = first["kind"] in ("exception", "diverged", "different", "hang")
    return is_of_code and all(first.get(key) == first_before.get(key) for key in keys)


# How to go on.


def resume_hint(folder: Path | None, first: MonitoredRank, words: list[str]) -> dict[str, Any]:
    """The part `run` of a report: the newest snapshot, the steps that are lost, the command that goes on.

    first: the rank that failed first. words: the typed command.
    """
    newest, saved_step = first.resumed_from, first.resumed_step
    if folder is not None and (own := newest_snapshot(folder)) is not None:
        newest, saved_step = str(own), int(own.name.removeprefix("step_"))
    return {
        "folder": None if folder is None else str(folder),
        "newest_snapshot": newest,
        "steps_lost": max(0, first.position()["step"] - saved_step),
        "resume": resume_command(words, folder),
        "time": time.time(),
    }


def newest_snapshot(run_dir: Path) -> Path | None:
    """The newest numbered snapshot."""
    found = run_dir.glob("snapshots/step_*")
    return max((path for path in found if re.fullmatch(r"step_\d+", path.name)), default=None)


def resume_command(words: list[str], folder: Path | None) -> str:
    """The command that goes on in the same run folder."""
    if not words or folder is None:
        return ""
    kept = [word for word in words if not word.startswith("hydra.run.dir=")]
    return shlex.join([*kept, f"hydra.run.dir={path_value(folder)}"])


# The screen.


def in_one_line(report: Report) -> str:
    """For example: rank 1 of 2: RuntimeError: mat1 and mat2 shapes cannot be multiplied."""
    first = report["first"]
    if first["kind"] in RAISED_BY_ALL:
        return str(first["message"])
    what = f"hangs: {first['verdict']}" if "verdict" in first else str(first.get("signal") or first["kind"])
    if first["kind"] == "killed":
        what = f"{what}: {first['meaning']}"
    if "type" in first:
        what = f"{first['type']}: {next(iter(first['message'].splitlines()), '')}"
    return f"rank {first['rank']} of {report['world_size']}: {what}"


def screen(report: Report) -> str:
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
        sentence = f"lockstep: {first['message']}".splitlines()
        lines = [*sentence, f"  raised by all ranks, first by {who} {process}{position}"]
        alike = f"{first['type']}: {first['message']}"
        consequences = [other for other in consequences if other["what"] != alike]
    else:
        happened = f"{who} {'hangs' if first['kind'] == 'hang' else 'failed first'}"
        if first.get("ranks") == []:
            happened = f"the {report['world_size']} ranks wait"
        lines = [f"lockstep: {happened} {process}{position}", *(f"  {line}" for line in _evidence(first))]
        for line in (f"what it means: {first['meaning']}", f"what to do: {first['advice']}"):
            lines += textwrap.wrap(line, COLUMNS, subsequent_indent="  ", break_long_words=False)
    if report["will_fail_again"]:
        lines.append("the start before ended with the same failure at the same step: it will fail again")
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
    lines = lines[: LINES - len(ends)]
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
