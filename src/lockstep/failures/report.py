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
from pathlib import Path

from lockstep.errors import EXIT_FAILED, KIND_CODES, RAISED_BY_ALL, path_value
from lockstep.failures.explain import explain_exit
from lockstep.failures.record import Record, heartbeat, last_lines, oom_kills, read, read_place
from lockstep.failures.verdict import parse_stack
from lockstep.files import write_whole

FILE = "failure.json"  # in the run folder
PRINTED = "printed"  # in the folder of ranks: one of them prints the report
SCHEMA = 4
ECHO_SECONDS, END_SECONDS = 2.0, 0.5  # for the report of the rank that failed first, and for what follows from it
LINES, COLUMNS = 40, 160  # of the screen
LOG_LINES, CONSEQUENCES, SAMPLES, STACK_LINES = 7, 6, 12, 8
MPI_LAUNCHERS = ("mpirun", "mpiexec", "orterun")
CRASH = "Fatal Python error: "  # faulthandler's words before the stack of a crash
CRASHES = {"Segmentation fault": -11, "Aborted": -6, "Bus error": -7, "Illegal instruction": -4}
ENDED = ("", "Z", "X")  # states of a process

Report = Record
"""What failure.json holds, see `docs/failures.md` for each key."""
Ends = Mapping[int, Record]
"""exit_code, time and is_echo (the launcher has ended it) of each rank whose process has ended."""


def process_state(pid: int) -> str:
    """The state letter of a process: R runs, S sleeps, D waits for the disk, T is stopped, Z has ended; "" is gone."""
    _, is_known, rest = read(Path(f"/proc/{pid}/stat")).rpartition(")")  # the name before it may contain spaces
    return rest[1:2] if is_known or os.path.exists("/proc/self") else "?"


def records_in(folder: Path | None) -> list[Record]:
    """Of the ranks of this machine, and of a hang."""
    texts = [read(file) for file in sorted(folder.glob("rank*.json"))] if folder else []
    return [json.loads(text) for text in texts if text]


def failures_in(folder: Path | None, ends: Ends | None = None) -> list[Record]:
    """The record of each rank of this machine that has failed: its own, or of an end without a word. ends: None for
    those that are gone; their starter alone knows the code."""
    records, found = records_in(folder), list[Record]()
    if ends is None:
        gone = [one["rank"] for one in records if process_state(one["pid"]) in ENDED]
        ends = dict.fromkeys(gone, {"exit_code": None, "time": time.time(), "is_echo": False})
    for one in records:
        if "kind" in one:
            found.append(one)
        elif folder and one["rank"] in ends and (place := read_place(folder, one["rank"])).name != "end":
            one |= ends[one["rank"]] | {"epoch": place.epoch, "step": place.step, "phase": place.name}
            stacks = read(folder / f"rank{one['rank']}.stacks")
            crash, _, frames = stacks.rpartition(CRASH)[2].partition("\n")
            code = CRASHES.get(crash) if one["exit_code"] is None else one["exit_code"]
            one["stack"] = [CRASH + crash, *map(str, parse_stack(frames, of_crash=True))] if crash in CRASHES else []
            no_memory = any(oom_kills(file) > count for file, count in one["oom"].items())
            one["signal"], one["meaning"], one["advice"] = explain_exit(code, place.name, no_memory)
            kind = "left" if code is not None and code >= 0 else "killed"
            found.append(one | {"kind": kind, "log_lines": last_lines(one["log"])})
    return found


def make_report(failures: Sequence[Record]) -> Report:
    """Of the ranks that have failed, empty if none has. The first one is the cause of a hang, or the earliest that is
    no echo: a rank that is lost makes others fail, and these may say so before its end is seen."""
    if not failures:
        return {}
    first = min(failures, key=lambda one: (one["kind"] != "hang", one["is_echo"], one["time"]))
    consequences = [
        {"rank": one["rank"], "host": one["host"], "pid": one["pid"], "what": _what(one)}
        | {"seconds_later": round(max(0.0, one["time"] - first["time"]), 3)}
        for one in sorted(failures, key=lambda one: float(one["time"]))
        if one["rank"] != first["rank"]
    ]
    (newest, saved_step), folder = first["resumed"] or (None, 0), first["run_dir"]
    if folder is not None and (own := newest_snapshot(Path(folder))) is not None:
        newest, saved_step = str(own), int(own.name.removeprefix("step_"))
    again = first["before"] is not None and first["before"] == identity(first)
    run = {"folder": folder, "newest_snapshot": newest, "steps_lost": max(0, first["step"] - saved_step)}
    run |= {"resume": "" if newest is None or again else resume_command(folder), "time": time.time()}
    report = {"schema": SCHEMA, "first": first, "consequences": consequences, "run": run, "will_fail_again": again}
    return report | {"world_size": first["world_size"], "exit_code": KIND_CODES.get(first["kind"], EXIT_FAILED)}


def identity(first: Record) -> Record | None:
    """What is alike in a failure that a restart cannot pass; None if a restart may."""
    keys = ("kind", "type", "file", "line", "step", "verdict", "ranks")
    return {key: first.get(key) for key in keys} if first["kind"] not in ("killed", "left", "config") else None


def tell(folder: Path | None, own: Record | None = None, ends: Ends | None = None) -> tuple[Report, bool]:
    """(the report on the ranks of this machine, empty if none has failed; whether this process prints it). It is left
    in the run folder. One process of a machine prints it, and who knows better than an earlier report. What is only the
    echo of a lost rank gives way: other ranks, also of other machines, may have failed first, and are awaited for a
    while. own: the record of this rank, if it is one. ends: see `failures_in`."""
    failures, start = failures_in(folder, ends), time.monotonic()
    while own and len(failures) < len(records_in(folder)):
        if time.monotonic() - start > (ECHO_SECONDS if own["is_echo"] else END_SECONDS):
            break
        time.sleep(0.02)
        failures = failures_in(folder)
    report = make_report(failures or ([own] if own else []))
    if not report or report["first"]["kind"] == "config":  # that rank shows its sentence itself
        return report, False
    first, run_dir, prints = report["first"], report["run"]["folder"], folder is None or claim(folder / PRINTED)
    if run_dir is None:
        return report, prints
    may_come = first["is_echo"] and len(failures) < report["world_size"]
    while (others := read_report(Path(run_dir))) is None and may_come and time.monotonic() - start < 2 * ECHO_SECONDS:
        time.sleep(0.02)
    if others is not None and (first["is_echo"] or not others["first"]["is_echo"]):
        run = others["run"]
        return others | {"run": run | {"resume": run["resume"] and resume_command(run_dir)}}, prints
    with suppress(OSError):  # a full disk costs the file
        write_whole(Path(run_dir, FILE), json.dumps(report, indent=1) + "\n", sync=False)
    return report, prints or others is not None


def claim(path: Path) -> bool:
    """Whether this process is the first to make the folder."""
    with suppress(OSError):
        path.mkdir()
        return True
    return False


def leave() -> None:
    """This rank ends. The last of those that another program has started removes the folder that they share."""
    heartbeat.enter("end")
    folder = heartbeat.folder
    alive = [one["rank"] for one in records_in(folder) if process_state(one["pid"]) not in ENDED]
    if folder is not None and all(read_place(folder, rank).name == "end" for rank in alive):
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():  # a thread that fails at this moment has written into it
            time.sleep(0.2)
            shutil.rmtree(folder, ignore_errors=True)


def read_report(folder: Path) -> Report | None:
    """What failure.json in the run folder holds."""
    with suppress(ValueError, AttributeError):
        contents: Report = json.loads(read(folder / FILE) or "{}")
        return contents if contents.get("schema") == SCHEMA else None
    return None


def newest_snapshot(run_dir: Path) -> Path | None:
    """The newest numbered snapshot."""
    found = run_dir.glob("snapshots/step_*")
    return max((path for path in found if re.fullmatch(r"step_\d+", path.name)), default=None)


def resume_command(run_dir: str) -> str:
    """The command that goes on in the same run folder: the words that started this process, with those of torchrun,
    mpirun or srun before them. Only of srun the words are not known: it runs on another machine."""
    words, started_by = [os.path.basename(sys.executable), *sys.argv], heartbeat.record["started_by"]
    program, *typed = read(Path(f"/proc/{os.getppid()}/cmdline")).rstrip("\0").split("\0")
    is_mpi = started_by == "mpirun" and os.path.basename(program) in MPI_LAUNCHERS
    if is_mpi or (started_by == "torchrun" and program):
        words = [os.path.basename(program)]
        for word in typed:  # `-x NAME` for `-x NAME=VALUE`, which may be a secret; where the ranks meet is none
            words.append(word.partition("=")[0] if words[-1] == "-x" and word[:7] != "MASTER_" else word)
    kept = [word for word in words if not word.startswith("hydra.run.dir=")]
    return shlex.join(["srun"] * (started_by == "srun") + [*kept, f"hydra.run.dir={path_value(Path(run_dir))}"])


def in_one_line(report: Report) -> str:
    """For example: rank 1 of 2: RuntimeError: mat1 and mat2 shapes cannot be multiplied."""
    first = report["first"]
    if first["kind"] in RAISED_BY_ALL:
        return str(first["message"])
    why = f": {first['meaning']}" if first["kind"] == "killed" else ""
    return f"rank {first['rank']} of {report['world_size']}: {_what(first)}{why}"


def _what(one: Record) -> str:
    if "type" in one:
        return f"{one['type']}: {one['message'].partition(chr(10))[0]}"
    return f"hangs: {one['verdict']}" if one["kind"] == "hang" else f"it ended: {one['signal']}"


def screen(report: Report) -> str:
    """At most 40 lines: what failed, what it means, what to type; what followed; the log; where the run is."""
    first, run, others = report["first"], report["run"], report["consequences"]
    who = f"rank {first['rank']} of {report['world_size']}"
    epoch = f", in epoch {first['epoch']}, after step {first['step']}" if first["epoch"] else ""
    where = f"({first['host']}, pid {first['pid']}){epoch}, in the phase {first['phase']}"
    if first["kind"] in RAISED_BY_ALL:
        head, *more = f"lockstep: {first['message']}".splitlines()
        lines = [*more, f"  raised by all ranks, first by {who} {where}"]
        others = [one for one in others if one["what"] != f"{first['type']}: {first['message']}"]
    else:
        head, seen = f"lockstep: {who} failed first {where}", [_what(first), *first.get("stack", [])[:STACK_LINES]]
        seen += [line for line in first.get("message", "").splitlines()[1:] if line.strip()][:3]
        if first["kind"] == "hang":
            head, silence = f"lockstep: {who} hangs {where}", f"{first['silent_seconds']:.0f} s"
            seen = [f"no rank has made progress for {silence}", *first["table"], f"verdict: {first['verdict']}"]
        if "file" in first:
            seen.append(f"at {first['file']}:{first['line']} in {first['function']}: {first['code']}")
            seen += [f"  {name}: {text}" for name, text in list(first["operands"].items())[:5]]
        if samples := first.get("samples", []):
            count = f", ... ({len(samples)} in all)" if len(samples) > SAMPLES else ""
            seen.append(f"its batch held the samples {', '.join(map(str, samples[:SAMPLES]))}{count}")
        lines = [f"  {line}" for line in seen]
        for line in (f"what it means: {first['meaning']}", f"what to do: {first['advice']}"):
            lines += textwrap.wrap(line, COLUMNS, subsequent_indent="  ", break_long_words=False)
    if report["will_fail_again"]:
        lines.append("the start before ended with the same failure at the same step: it will fail again")
    lines += ["consequences:"] * bool(others)
    for one in others[:CONSEQUENCES]:
        process = f"rank {one['rank']} ({one['host']}, pid {one['pid']})"
        lines.append(f"  {process} {one['seconds_later']:.2f} s later: {one['what']}")
    lines += [f"  and {len(others) - CONSEQUENCES} other ranks"] * (len(others) > CONSEQUENCES)
    if first["log"]:
        lines += [f"its log, {first['log']}, ends with:", *(f"  {line}" for line in first["log_lines"][-LOG_LINES:])]
    ends = [f"run folder: {run['folder'] or 'none yet'}"]
    ends.append(f"newest snapshot: {run['newest_snapshot'] or 'none'}; steps lost: {run['steps_lost']}")
    ends += [f"resume: {run['resume']}"] if run["resume"] else []
    shown = [line.replace(f"{os.getcwd()}/", "")[:COLUMNS] for line in lines[: LINES - 1 - len(ends)]]
    return "\n".join([head, *shown, *ends])
