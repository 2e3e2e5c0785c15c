"""The failure report: which rank failed first, why, where, and how to go on. As JSON and as one screen."""

import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_FAILED, KIND_CODES, RAISED_BY_ALL, path_value
from lockstep.failures.explain import explain_exception, explain_exit
from lockstep.failures.processes import ENDED, oom_kills, process_state
from lockstep.failures.record import last_lines, phase_of, read_place
from lockstep.files import write_whole

FILE = "failure.json"  # in the run folder
VERDICT, PRINTED = "verdict.json", "printed"  # in the folder of ranks: of a hang; a rank prints the report
SCHEMA = 4
ECHO_SECONDS, END_SECONDS = 2.0, 0.5  # for the report of the rank that failed first, and for what follows from it
LINES, COLUMNS = 40, 160  # of the screen
LOG_LINES, CONSEQUENCES, SAMPLES, STACK_LINES, HANG_ROWS = 7, 6, 12, 8, 18
MPI_LAUNCHERS = ("mpirun", "mpiexec", "orterun")
CRASH = "Fatal Python error: "  # faulthandler's words before the stack of a crash
CRASHES = {"Segmentation fault": -11, "Aborted": -6, "Bus error": -7, "Illegal instruction": -4}

Report = dict[str, Any]
"""What failure.json holds, see `docs/failures.md` for each key."""


@dataclass(frozen=True)
class End:
    """How a rank's process has ended, as who saw it knows. code: None if it is not known. time: since 1970.

    is_ours: the launcher ended it, after another one had failed.
    """

    code: int | None
    time: float
    is_ours: bool = False


def failures_in(folder: Path, ends: Mapping[int, End]) -> list[dict[str, Any]]:
    """The record of each rank of this machine that has failed: its own, or of an end without a word."""
    found: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        found.append(json.loads((folder / VERDICT).read_text()))
    hanging = [one["rank"] for one in found]
    for file in sorted(folder.glob("rank*.who")):
        with suppress(OSError, ValueError):
            who = json.loads(file.read_text())
            if who["rank"] in hanging:
                continue
            if (own := file.with_suffix(".json")).exists():
                found.append(json.loads(own.read_text()))
            elif who["rank"] in ends and (place := read_place(folder, who["rank"])).name != "end":
                position = {"epoch": place.epoch, "step": place.step, "phase": place.name}
                of_end = _of_end(who, ends[who["rank"]], place.name, file.with_suffix(".stacks"))
                found.append(who | position | of_end | {"log_lines": last_lines(who["log"])})
    return found


def _of_end(who: Mapping[str, Any], end: End, phase: str, stacks: Path) -> dict[str, Any]:
    text = stacks.read_text(errors="replace").rpartition(CRASH)[2]
    crash, _, frames = text.partition("\n") if text.partition("\n")[0] in CRASHES else ("", "", "")
    code = end.code if end.code is not None or not crash else CRASHES[crash]
    name, meaning, advice = explain_exit(code, phase, oom_kills(who["oom"][0]) > who["oom"][1])
    thread = re.search(r"Current thread .*\n((?:  File .*\n?)+)", frames) or re.search(r"((?:  File .*\n?)+)", frames)
    stack = [CRASH + crash, *map(str.strip, thread[1].splitlines() if thread else [])] if crash else []
    kind = "left" if code is not None and code >= 0 else "killed"
    described = {"kind": kind, "signal": name, "exit_code": code, "stack": stack, "meaning": meaning, "advice": advice}
    return described | {"time": end.time, "is_echo": end.is_ours}


def has_failed_rank(folder: Path | None) -> bool:
    """Whether a rank of this machine has failed by itself, or has gone without a word."""
    found = [] if folder is None else failures_in(folder, _gone(folder))
    return any(not one["is_echo"] for one in found)


def _gone(folder: Path) -> dict[int, End]:
    """How the ranks of this machine whose processes are gone have ended."""
    siblings = [json.loads(file.read_text()) for file in folder.glob("rank*.who")]
    gone = [one["rank"] for one in siblings if process_state(one["pid"]) in ENDED]
    return dict.fromkeys(gone, End(None, time.time()))  # its starter alone knows the code


def make_report(failures: Sequence[dict[str, Any]], command: list[str]) -> Report | None:
    """Of the ranks that have failed, None if none has.

    The first one is the cause of a hang, or the earliest that is no echo: a rank that is lost makes others fail, and
    these may say so before its end is seen.
    """
    if not failures:
        return None
    first = min(failures, key=lambda one: (one["kind"] != "hang", one["is_echo"], one["time"]))
    if first["kind"] not in ("hang", "killed", "left"):
        first["meaning"], first["advice"] = explain_exception(first)
    others = sorted((one for one in failures if one is not first), key=lambda one: float(one["time"]))
    folder = None if first["run_dir"] is None else Path(first["run_dir"])
    newest, saved_step = first["resumed"] or (None, 0)
    if folder is not None and (own := newest_snapshot(folder)) is not None:
        newest, saved_step = str(own), int(own.name.removeprefix("step_"))
    report = {
        "schema": SCHEMA,
        "first": first,
        "consequences": [_consequence(one, first) for one in others],
        "world_size": first["world_size"],
        "exit_code": KIND_CODES.get(first["kind"], EXIT_FAILED),
        "will_fail_again": first["before"] is not None and first["before"] == identity(first),
    }
    run = {"folder": first["run_dir"], "newest_snapshot": newest, "time": time.time()}
    report["run"] = run | {"steps_lost": max(0, first["step"] - saved_step), "resume": ""}
    return _with_resume(report, command)


def _with_resume(report: Report, command: list[str]) -> Report:
    """With the command that goes on, in the same folder; without one where it would not help."""
    run = report["run"]
    helps = run["newest_snapshot"] is not None and not report["will_fail_again"]
    return report | {"run": run | {"resume": resume_command(command, run["folder"]) if helps else ""}}


def identity(first: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is alike in a failure that a restart cannot pass; None if a restart may."""
    keys = ("kind", "type", "file", "line", "step", *(("meaning",) if first["kind"] == "hang" else ()))
    return {key: first.get(key) for key in keys} if first["kind"] not in ("killed", "left", "config") else None


def _consequence(one: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    seconds = round(max(0.0, one["time"] - first["time"]), 3)
    what = "was ended" if first["kind"] == "hang" or one["is_echo"] else f"ended ({one.get('signal')})"
    if "type" in one:
        what = f"{one['type']}: {one['message'].partition(chr(10))[0]}"
    return {key: one[key] for key in ("rank", "host", "pid")} | {"seconds_later": seconds, "what": what}


def publish(report: Report, command: list[str], is_part: bool) -> tuple[Report, bool]:
    """Write failure.json in the run folder. Returns the report that is there, and whether this one has replaced it.

    What is only the echo of a lost rank gives way. is_part: ranks of other machines may have failed first: their report
    is awaited for a while.
    """
    folder, is_echo = report["run"]["folder"], report["first"]["is_echo"]
    if folder is None or report["first"]["kind"] == "config":
        return report, False
    deadline = time.monotonic() + (ECHO_SECONDS if is_part and is_echo else 0.0)
    while (others := read_report(Path(folder))) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if others is not None and (is_echo or not others["first"]["is_echo"]):
        return _with_resume(others, command), False
    with suppress(OSError):  # a full disk costs the file
        write_whole(Path(folder, FILE), json.dumps(report, indent=1) + "\n", sync=False)
    return report, others is not None


def tell(own: dict[str, Any], folder: Path | None, command: list[str]) -> tuple[Report, bool]:
    """The report of ranks that another program has started, by the one of them that fails with the record `own`, and
    whether this rank has to print it: one of each machine does, and who knows better than an earlier report.
    """
    failures, is_first = [own], True
    deadline = time.monotonic() + (ECHO_SECONDS if own["is_echo"] else END_SECONDS)
    while folder is not None and time.monotonic() < deadline:
        failures = failures_in(folder, _gone(folder))
        if len(failures) == len([*folder.glob("rank*.who")]):
            break
        time.sleep(0.02)
    report = make_report(failures, command)
    assert report is not None
    if report["first"]["kind"] == "config":  # that rank shows its sentence itself
        return report, False
    if folder is not None:
        is_first = claim(folder / PRINTED)
    report, has_replaced = publish(report, command, is_part=len(failures) < own["world_size"])
    return report, is_first or has_replaced


def claim(path: Path) -> bool:
    """Whether this process is the first to make the file."""
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    return False


def leave(folder: Path | None) -> None:
    """Remove the folder that ranks of another program's share, in the last of them that ends."""
    with suppress(OSError, ValueError):
        siblings = [json.loads(file.read_text()) for file in folder.glob("rank*.who")] if folder is not None else []
        alive = [one["rank"] for one in siblings if process_state(one["pid"]) not in ENDED]
        if folder is not None and all(phase_of(folder, rank) == "end" for rank in alive):
            shutil.rmtree(folder, ignore_errors=True)


def read_report(folder: Path) -> Report | None:
    """What failure.json in the run folder holds."""
    try:
        contents = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return None
    return contents if isinstance(contents, dict) and contents.get("schema") == SCHEMA else None


# How to go on.


def newest_snapshot(run_dir: Path) -> Path | None:
    """The newest numbered snapshot."""
    found = run_dir.glob("snapshots/step_*")
    return max((path for path in found if re.fullmatch(r"step_\d+", path.name)), default=None)


def resume_command(words: list[str], run_dir: str | None) -> str:
    """The command that goes on in the same run folder."""
    if not words or run_dir is None:
        return ""
    kept = [word for word in words if not word.startswith("hydra.run.dir=")]
    return shlex.join([*kept, f"hydra.run.dir={path_value(Path(run_dir))}"])


def typed_command(started_by: str = "python") -> list[str]:
    """The words that started this process, with those of torchrun, mpirun or srun before them if it was one of these.

    started_by: see `RankInfo`. Only of srun the words are not known: it runs on another machine.
    """
    own = [os.path.basename(sys.executable), *sys.argv]
    if started_by == "srun":
        return ["srun", *own]
    words: list[str] = []
    if started_by in ("torchrun", "mpirun"):
        with suppress(OSError):
            words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    if not words or (started_by == "mpirun" and os.path.basename(words[0]) not in MPI_LAUNCHERS):
        return own
    pairs = pairwise(words)  # `-x NAME` for `-x NAME=VALUE`, which may be a secret; where the ranks meet is none
    hides = [before == "-x" and not word.startswith("MASTER_") for before, word in pairs]
    shown = [word.partition("=")[0] if is_hidden else word for word, is_hidden in zip(words[1:], hides, strict=True)]
    return [os.path.basename(words[0]), *shown]


# The screen.


def in_one_line(report: Report) -> str:
    """For example: rank 1 of 2: RuntimeError: mat1 and mat2 shapes cannot be multiplied."""
    first = report["first"]
    if first["kind"] in RAISED_BY_ALL:
        return str(first["message"])
    what = f"hangs: {first['verdict']}" if "verdict" in first else _evidence(first)[0]
    why = f": {first['meaning']}" if first["kind"] == "killed" else ""
    return f"rank {first['rank']} of {report['world_size']}: {what}{why}"


def screen(report: Report) -> str:
    """At most 40 lines: what failed, what it means, what to type; what followed; the log; where the run is."""
    first, run = report["first"], report["run"]
    if first["kind"] == "config":
        return f"lockstep: {first['message']}"
    who, process = f"rank {first['rank']} of {report['world_size']}", f"({first['host']}, pid {first['pid']})"
    epoch = f", in epoch {first['epoch']}, after step {first['step']}" if first["epoch"] else ""
    position, consequences = f"{epoch}, in the phase {first['phase']}", report["consequences"]
    if first["kind"] in RAISED_BY_ALL:
        sentence = f"lockstep: {first['message']}".splitlines()
        lines = [*sentence, f"  raised by all ranks, first by {who} {process}{position}"]
        alike = f"{first['type']}: {first['message']}"
        consequences = [other for other in consequences if other["what"] != alike]
    else:
        happened = f"{who} {'hangs' if first['kind'] == 'hang' else 'failed first'}"
        lines = [f"lockstep: {happened} {process}{position}", *(f"  {line}" for line in _evidence(first))]
        for line in (f"what it means: {first['meaning']}", f"what to do: {first['advice']}"):
            lines += textwrap.wrap(line, COLUMNS, subsequent_indent="  ", break_long_words=False)
    if report["will_fail_again"]:
        lines.append("the start before ended with the same failure at the same step: it will fail again")
    lines += ["consequences:"] * bool(consequences)
    for other in consequences[:CONSEQUENCES]:
        process = f"rank {other['rank']} ({other['host']}, pid {other['pid']})"
        lines.append(f"  {process} {other['seconds_later']:.2f} s later: {other['what']}")
    if len(consequences) > CONSEQUENCES:
        lines.append(f"  and {len(consequences) - CONSEQUENCES} other ranks")
    ends = [f"run folder: {run['folder'] or 'none yet'}"]
    ends.append(f"newest snapshot: {run['newest_snapshot'] or 'none'}; steps lost: {run['steps_lost']}")
    ends += [f"resume: {run['resume']}"] if run["resume"] else []
    if first["log"]:
        room = max(1, min(LOG_LINES, LINES - len(lines) - len(ends) - 1))
        lines.append(f"its log, {_shown(first['log'])}, ends with:")
        lines += [f"  {line}" for line in first["log_lines"][-room:]]
    lines = lines[: LINES - len(ends)]
    is_short = {line: len(line) <= COLUMNS or line.startswith("lockstep: ") for line in lines}
    return "\n".join([*(line if is_short[line] else f"{line[: COLUMNS - 3]}..." for line in lines), *ends])


def _evidence(first: Mapping[str, Any]) -> list[str]:
    """What was seen: the table of a hang, the exception and its place, or how the process ended and its stack."""
    if "table" in first:
        silence = f"no rank has made progress for {first['silent_seconds']:.0f} s"
        return [silence, *first["table"][:HANG_ROWS], f"verdict: {first['verdict']}"]
    if "type" in first:
        message = [line for line in first["message"].splitlines() if line.strip()][:4] or [""]
        lines = [f"{first['type']}: {message[0]}", *message[1:]]
    else:
        lines = [f"it ended: {first['signal']}"]
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
