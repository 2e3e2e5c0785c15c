"""The failure report as one screen of text."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

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
