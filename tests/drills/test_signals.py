"""Ctrl-C, a closed terminal and `kill` at each moment of a run: the exit code, the words, the files, how it goes on.

A signal from the terminal goes to all processes of the group; `kill` sends it to the launcher alone.
LOCKSTEP_SIGNALS=all tries both signals in each phase under each launcher, and at more early moments.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import LAUNCHERS, TRAIN, processes_of, skip_without_mpirun, wait_for
from support.event_files import MEASURED, scalars
from support.faults import PARTS, is_at
from support.run_folders import newest_snapshot, read_log, stopped_at
from support.worlds import same_bits

pytestmark = pytest.mark.drill

INT, HUP, TERM = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
SECONDS = {"meeting": 60, "prepare": 60, "build": 60, "forward": 0.2, "evaluation": 0.2, "snapshot": 1, "end": 7}
BEFORE_TRAINING = ("meeting", "prepare", "build")
OURS = ("launch=torchrun", "launch=spawn", "launch=fork", "python")  # torchrun and mpirun have codes of their own
ALL = os.environ.get("LOCKSTEP_SIGNALS") == "all"


def name(value):
    return getattr(value, "name", None) or str(value)


def lines_of(run):
    return re.findall("^lockstep: .*", run.output, flags=re.MULTILINE)


def wait_for_the_end(run):
    wait_for(lambda: not processes_of(run.process.pid), "end of all processes", limit=20)


@pytest.fixture
def run_at(start_faulty, tmp_path):
    def started(starter, phase, *words, before=(), seconds=None):
        typed = [*before, *LAUNCHERS[starter], *PARTS, "evaluation.batch_size=2", *words]
        ranks = 1 if phase == "meeting" else "all"
        run = start_faulty(*typed, FAULT=f"{phase}/{seconds or SECONDS[phase]}:{ranks}:%1")
        wait_for(lambda: is_at(tmp_path, phase), phase)
        return run

    return started


ROWS = [
    *[("python", "prepare", INT, "group"), ("python", "snapshot", INT, "group"), ("python", "build", HUP, "group")],
    *[("launch=torchrun", phase, INT, "group") for phase in ("meeting", "forward")],
    *[("launch=torchrun", "prepare", HUP, "group"), ("launch=torchrun", "evaluation", HUP, "launcher")],
    *[("launch=spawn", "end", INT, "group"), ("launch=spawn", "forward", HUP, "launcher")],
    *[("launch=fork", "build", INT, "group"), ("launch=fork", "meeting", HUP, "launcher")],
    ("launch=fork", "end", TERM, "launcher"),  # which lasts longer than a rank is waited for after a failure
    *[("torchrun", "forward", INT, "group"), ("torchrun", "evaluation", HUP, "launcher")],
]
if ALL:
    ROWS = [(starter, phase, number, "group") for starter in LAUNCHERS for phase in SECONDS for number in (INT, HUP)]
    # One rank meets nobody. mpirun kills what has not ended a second after the signal.
    left_out = [("python", "meeting"), ("mpirun", "snapshot"), ("mpirun", "end")]
    ROWS = [row for row in ROWS if row[:2] not in left_out]


@pytest.mark.parametrize(("starter", "phase", "number", "who"), ROWS, ids=name)
def test_one_signal(run_at, tmp_path, starter, phase, number, who):
    skip_without_mpirun(starter)
    run, is_ours = run_at(starter, phase, f"trainer.epochs={1 if phase == 'end' else 100}"), starter in OURS
    run.send(number, who)
    before = 130 if number == INT else 76
    run.finish((before if phase in BEFORE_TRAINING else 0 if phase == "end" else 75) if is_ours else None)
    assert not is_ours or "Traceback" not in run.output
    if phase in BEFORE_TRAINING:
        assert not is_ours or [line.endswith("; there is nothing to save") for line in lines_of(run)] == [True]
        assert not (tmp_path / "run/snapshots").exists()
    elif phase == "end":
        assert "finished:" in run.output
    else:
        assert not lines_of(run) or not is_ours
        assert newest_snapshot(tmp_path / "run")["progress"]["step"] == stopped_at(tmp_path / "run")
    wait_for_the_end(run)


def test_under_nohup_a_closed_terminal_stops_nothing(run_at, tmp_path):
    run = run_at("launch=torchrun", "forward", "trainer.epochs=100", before=["nohup"])
    run.send(HUP, "group")
    seen = len(list((tmp_path / "run").glob("snapshots/step_*[0-9]")))
    wait_for(lambda: len(list((tmp_path / "run").glob("snapshots/step_*[0-9]"))) > seen, "another snapshot")
    run.send(TERM, "group")
    run.finish(75)


@pytest.mark.parametrize("starter", ["python", "launch=fork", "launch=spawn", "torchrun"])
def test_a_second_ctrl_c_ends_at_once_with_one_line_and_leaves_no_orphan(run_at, starter):
    run, is_ours = run_at(starter, "forward", seconds=600), starter in OURS
    run.send(INT, "group")
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(3)  # a signal within 2 s is the same one
    run.send(INT, "group")
    run.finish(130 if is_ours else None, limit=20)
    (line,) = lines_of(run)
    second = "Ctrl-C" if is_ours else "(Ctrl-C|SIGTERM)"  # torchrun may send its SIGTERM first
    assert re.match(f"lockstep: ended at once by a second {second}; no snapshot was saved", line)
    assert not is_ours or "Ctrl-C: stopping after this step; a second one ends at once" in run.output
    assert not is_ours or "Traceback" not in run.output
    wait_for_the_end(run)


def test_a_second_sigterm_beside_a_rank_that_hangs_ends_with_76_and_names_the_last_snapshot(start_faulty, tmp_path):
    run = start_faulty(*LAUNCHERS["launch=fork"], *PARTS, "snapshot.every=2steps", FAULT="forward/hang:1:6")
    wait_for(lambda: (tmp_path / "in-forward-1").exists(), "hang")
    run.send(TERM)
    time.sleep(3)
    run.send(TERM)
    run.finish(76)
    assert "the last good snapshot is " in run.output
    assert "snapshots/step_00000004; go on there with hydra.run.dir=" in run.output


def test_a_stop_in_an_evaluation_drops_it_and_a_resumed_run_repeats_it(start, run_at, tmp_path):
    """runs/test_delayed_exchange.py has a moving average."""
    words = ["evaluation.batch_size=2", "trainer.max_steps=6"]
    start(*LAUNCHERS["launch=fork"], *PARTS, *words, "hydra.run.dir=whole").finish()
    run = run_at("launch=fork", "evaluation", *words, seconds=0.5)
    run.send(TERM)
    run.finish(75)
    assert (tmp_path / f"run/snapshots/step_{stopped_at(tmp_path / 'run'):08d}").exists()
    assert "val loss" not in run.output
    again = start(*LAUNCHERS["launch=fork"], *PARTS, *words).finish()
    first = next(line for line in again.output.splitlines() if line.startswith("epoch "))
    assert "epoch 2/" in again.output
    assert "samples/s" not in first  # this process has trained no step of it
    assert same_bits(tmp_path / "whole", tmp_path / "run")
    found, whole = (scalars(tmp_path / folder) for folder in ("run", "whole"))
    assert found.keys() == whole.keys()
    assert all(found[tag] == whole[tag] for tag in whole if not tag.startswith(MEASURED))
    assert "finished:" in read_log(tmp_path / "run")


EARLY = [(INT, [], 130), (HUP, ["launch=fork"], 76), (INT, ["launch=spawn"], 130)]
MOMENTS = [0.15, 0.8, 2.2]  # seconds after the command has its handlers of signals
if ALL:
    WORDS = [[], ["launch=torchrun"], ["launch=spawn"], ["launch=fork"]]
    EARLY = [(number, words, code) for number, code in ((INT, 130), (HUP, 76)) for words in WORDS]
    MOMENTS = [0.15, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 1.2, 1.5, 1.8, 2.2]


def handles_signals(pid):
    """Whether the command has a handler for SIGTERM, the last that it sets; Python itself has none."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) & 1 << TERM - 1)


@pytest.mark.new_process
@pytest.mark.parametrize(("number", "words", "code"), EARLY, ids=name)
def test_an_early_interrupt_ends_the_command_at_once_and_without_a_traceback(start, number, words, code):
    """While Hydra composes, while torch is imported, also in the processes that it starts."""
    codes = []
    for moment in MOMENTS:
        run = start(sys.executable, TRAIN, "model=mlp", "trainer.epochs=30000", *words)
        wait_for(lambda run=run: handles_signals(run.process.pid), "handler")  # before it, Python shows a traceback
        time.sleep(moment)
        run.send(number, "group")
        assert "Traceback" not in run.finish(None, limit=20).output, f"after {moment} s:\n{run.output}"
        codes.append(run.process.returncode)
    assert codes[0] == code
    assert set(codes) <= {code, 75, 76}, codes  # the later ones may find a training
