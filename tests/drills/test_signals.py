"""Ctrl-C and a closed terminal in each phase of a run, under each way to start it: the exit code, the words, the files.

A signal from the terminal goes to all processes of the group; `kill` sends it to the launcher alone.
LOCKSTEP_SIGNALS=all tries both signals in each phase under each launcher.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from support.commands import LAUNCHERS, STARTERS, Command, processes_of, wait_for
from support.phases import PARTS, in_phase
from support.run_folders import newest_snapshot, stopped_at

pytestmark = pytest.mark.drill

TESTS = Path(__file__).parents[1]
INT, HUP, TERM = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
SECONDS = {"import": 0, "meeting": 60, "prepare": 60, "build": 60, "step": 0.2, "evaluation": 0.2, "snapshot": 1}
SECONDS |= {"end": 3}
BEFORE_TRAINING = ("import", "meeting", "prepare", "build")
OURS = ("launch=torchrun", "launch=spawn", "launch=fork", "python")


def start_in_phase(start, tmp_path: Path, starter: str, phase: str, *words: str) -> Command:
    """A command that has come to `phase`."""
    env = {"LINGER": f"{phase}:{SECONDS[phase]}", "PYTHONPATH": TESTS}
    limit = "trainer.epochs=1" if phase == "end" else "trainer.epochs=100"
    run = start(*words, *LAUNCHERS[starter], *PARTS, "evaluation.batch_size=2", limit, **env)
    if phase == "import":
        wait_for(lambda: Path(f"/proc/{run.process.pid}/maps").read_text().count("libtorch"), "import of torch")
    else:
        wait_for(lambda: in_phase(tmp_path, phase), phase)
    return run


def expected_code(phase: str, number: int) -> int:
    if phase in BEFORE_TRAINING:
        return 130 if number == signal.SIGINT else 76
    return 0 if phase == "end" else 75


ROWS = [
    *[("python", phase, INT, "group") for phase in SECONDS if phase != "meeting"],
    ("python", "step", HUP, "group"),
    *[("launch=torchrun", phase, INT, "group") for phase in SECONDS if phase != "snapshot"],
    ("launch=torchrun", "prepare", HUP, "group"),
    ("launch=torchrun", "evaluation", HUP, "launcher"),
    *[("launch=spawn", phase, INT, "group") for phase in ("import", "meeting", "step", "end")],
    ("launch=fork", "meeting", HUP, "launcher"),
    ("launch=spawn", "step", HUP, "launcher"),
    *[("launch=fork", phase, INT, "group") for phase in ("build", "snapshot")],
    ("launch=fork", "step", HUP, "group"),
]
FOREIGN_ROWS = [("torchrun", "step", INT, "group"), ("torchrun", "evaluation", HUP, "launcher")]
if os.environ.get("LOCKSTEP_SIGNALS") == "all":
    PHASES = [(phase, number, "group") for phase in SECONDS for number in (INT, HUP)]
    ROWS = [(starter, *rest) for starter in OURS for rest in PHASES]
    ROWS = [row for row in ROWS if row[:2] != ("python", "meeting")]  # one rank meets nobody
    FOREIGN_ROWS = [("torchrun", *rest) for rest in PHASES]
    # mpirun kills what has not ended a second after the signal. It imports no torch itself.
    FOREIGN_ROWS += [("mpirun", *rest) for rest in PHASES if rest[0] not in ("import", "snapshot", "end")]


@pytest.mark.parametrize(
    ("starter", "phase", "number", "who"),
    [pytest.param(*row, marks=[pytest.mark.new_process] * (row[1] == "import")) for row in [*ROWS, *FOREIGN_ROWS]],
    ids=lambda value: getattr(value, "name", value),
)
def test_one_signal(start_faulty, tmp_path, starter, phase, number, who):
    """torchrun and mpirun have words and codes of their own."""
    run = start_in_phase(start_faulty, tmp_path, starter, phase)
    run.send(number, who)
    run.finish(expected_code(phase, number) if starter in OURS else None)
    lines = re.findall("^lockstep: .*", run.output, flags=re.MULTILINE)
    assert "Traceback" not in run.output or starter not in OURS
    if phase in BEFORE_TRAINING:
        assert starter not in OURS or [line.endswith("; there is nothing to save") for line in lines] == [True]
        assert not (tmp_path / "run/snapshots").exists()
    elif phase == "end":
        assert "finished:" in run.output
    else:
        assert not lines or starter not in OURS
        assert newest_snapshot(tmp_path / "run")["progress"]["step"] == stopped_at(tmp_path / "run")
    wait_for(lambda: not processes_of(run.process.pid), "end of all processes", limit=20)
    assert starter not in OURS or list(run.temporary.glob("pymp-*")) == []


def test_under_nohup_a_closed_terminal_stops_nothing(start_faulty, tmp_path):
    run = start_in_phase(start_faulty, tmp_path, "launch=torchrun", "step", "nohup")
    run.send(HUP, "group")
    seen = len(list((tmp_path / "run").glob("snapshots/step_*[0-9]")))
    wait_for(lambda: len(list((tmp_path / "run").glob("snapshots/step_*[0-9]"))) > seen, "another snapshot")
    run.send(TERM, "group")
    run.finish(75)


@pytest.mark.parametrize("starter", [*OURS, "torchrun"])
def test_a_second_ctrl_c_ends_at_once_with_one_line_and_leaves_no_orphan(start_faulty, tmp_path, starter):
    run = start_faulty(*STARTERS[starter], *PARTS, LINGER="step:600", PYTHONPATH=TESTS)
    wait_for(lambda: in_phase(tmp_path, "step"), "first step")
    run.send(INT, "group")
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(4)
    run.send(INT, "group")
    run.process.wait(20)
    run.finish(130 if starter in OURS else None)
    (line,) = re.findall("^lockstep: .*", run.output, flags=re.MULTILINE)
    second = "Ctrl-C" if starter in OURS else "(Ctrl-C|SIGTERM)"  # torchrun may send its SIGTERM first
    assert re.match(f"lockstep: ended at once by a second {second}; no snapshot was saved", line)
    assert "Traceback" not in run.output or starter not in OURS
    wait_for(lambda: not processes_of(run.process.pid), "end of all processes", limit=20)
