"""A table of what was broken on purpose: one row for each command that a fault met, printed after the tests."""

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support.commands import Command, processes_of

MARK = "LOCKSTEP_DRILL"  # every process of a command inherits it
SHARED_MEMORY = Path("/dev/shm")
OF_TORCH = ("torchelastic_", "torchinductor_")  # torchrun's log folder and a compiler's cache, which torch leaves
PATIENCE = 10.0  # seconds after the end of a command, in which its processes may end
PATIENCE_WITH_OTHERS = 30.0  # what a command has left stays for ever; another test's killed rank leaves it for a while
MEANINGS = {0: "finished", 1: "failed", 2: "refused", 4: "hang", 75: "stopped, saved", 76: "stopped, not saved"}


# Where something is broken on purpose: all tests of these files. `make faults` runs them.
FILES = """
test_closed_output test_disks test_early_interrupts test_elastic test_faults test_hangs
test_hosts test_interrupted_runs test_kills test_mpirun test_promise test_signals test_slurm_jobs
test_stops test_waits_and_exits test_worker_signals
"""


class Traces:
    """What a command leaves: processes of its session or with a variable in their environment, files by their place."""

    def __init__(self) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="drill-"))  # short: the path of a socket has at most 107 bytes
        self.environment = {"TMPDIR": str(self.temporary), MARK: self.temporary.name}
        self.shared_before = set(os.listdir(SHARED_MEMORY))

    def processes(self, session: int) -> list[str]:
        """The words of each process of the command that is alive. session: the pid of its first process."""
        found, entry, together = [], f"\0{MARK}={self.temporary.name}\0".encode(), processes_of(session)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if int(process.name) in together or entry in b"\0" + (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    def orphans(self, session: int) -> list[str]:
        """Those that do not end within PATIENCE. To be called after the command's end."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.processes(session)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def files(self) -> list[str]:
        """What lies in TMPDIR, and what is new in /dev/shm, stays there and is no living process's."""
        deadline, shared = time.monotonic() + PATIENCE_WITH_OTHERS, set(os.listdir(SHARED_MEMORY)) - self.shared_before
        while shared and time.monotonic() < deadline:
            time.sleep(0.1)
            shared = shared & set(os.listdir(SHARED_MEMORY)) - _mapped()
        return sorted([name for name in os.listdir(self.temporary) if not name.startswith(OF_TORCH)] + list(shared))

    def remove(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


def _mapped() -> set[str]:
    """The names in /dev/shm of which a process has a mapping."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            found.update(re.findall(rf" {SHARED_MEMORY}/(\S+)", (process / "maps").read_text(errors="replace")))
    return found


@dataclass(frozen=True)
class Row:
    """seconds: from the fault, where its time is known, or else from the start, to the end of the command.

    exit_code, orphans, leftovers: None where they are not known.
    """

    fault: str
    launcher: str
    outcome: str
    seconds: float
    exit_code: int | None
    orphans: list[str] | None
    leftovers: list[str] | None
    is_right: bool = True


def name_of(test: str) -> str:
    """The words of a test's name or node id."""
    return test.rpartition("::")[2].removeprefix("test_").replace("_", " ")


def launcher_of(words: list[str]) -> str:
    line = " ".join(words)
    ours = re.search(r"\blaunch=(\w+)", line)
    if ours:
        return ours[1]
    return next(
        (name for name in ("torchrun", "mpirun", "srun") if name in line.replace("distributed.run", name)), "python"
    )


def report_of(command: Command) -> dict[str, Any] | None:
    """The first failure in the report that the command has left."""
    for file in command.cwd.rglob("failure.json"):
        first: dict[str, Any] = json.loads(file.read_text())["first"]
        if first["time"] > command.started:
            return first
    return None


def row_of(fault: str, command: Command, traces: Traces) -> Row:
    """The row of a command that has ended."""
    code, first = command.process.returncode, report_of(command)
    stopped = re.search(r"stopped early at step \d+", command.output)
    if first:
        outcome = f"rank {first['rank']}: {first['kind']}"
    elif stopped:
        outcome = stopped[0]
    elif code is not None and code < 0:
        outcome = signal.Signals(-code).name
    else:
        outcome = MEANINGS.get(code or 0, "ended by Ctrl-C" if code == 130 else "-")
    broken = command.broken_at or (first["time"] if first else command.started)
    seconds = (command.ended or time.time()) - broken
    orphans = traces.orphans(command.process.pid)
    return Row(fault, launcher_of(command.command), outcome, seconds, code, orphans, traces.files())


def add_row(test: pytest.Item, row: Row) -> None:
    test.user_properties.append(("fault", json.dumps(asdict(row))))


def table(stats: dict[str, list[Any]]) -> list[str]:
    """The lines of the table, from pytest's reports."""
    reports = [report for group in stats.values() for report in group if isinstance(report, pytest.TestReport)]
    failed = {report.nodeid for report in reports if report.failed}
    lines, with_rows = [], set()
    for report in reports:
        rows = [Row(**json.loads(value)) for name, value in report.user_properties if name == "fault"]
        if rows and report.when == "teardown":
            with_rows.add(report.nodeid)
            is_wrong = report.nodeid in failed and all(row.is_right for row in rows)
            lines += [_line(replace(row, is_right=row.is_right and not is_wrong)) for row in rows]
    for report in reports:
        if report.when == "call" and "fault" in report.keywords and report.nodeid not in with_rows:
            outcome = "as wanted" if report.passed else "see above"
            lines.append(_line(Row(name_of(report.nodeid), "-", outcome, report.duration, *[None] * 3, report.passed)))
    titles = f"{'fault':70} {'launcher':16} {'outcome':26} {'seconds':>7} {'exit':>4} {'orphans':>7} leftovers"
    return [titles, *lines] if lines else []


def _line(row: Row) -> str:
    outcome = row.outcome if row.is_right else f"WRONG: {row.outcome}"
    code = "-" if row.exit_code is None else row.exit_code
    alive = "-" if row.orphans is None else len(row.orphans)
    left = "-" if row.leftovers is None else " ".join(row.leftovers) or "0"
    return f"{row.fault[:70]:70} {row.launcher:16} {outcome:26} {row.seconds:7.2f} {code:>4} {alive:>7} {left}"
