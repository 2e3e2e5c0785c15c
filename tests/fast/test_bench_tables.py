"""The arithmetic of the benchmarks: ratios and verdicts."""

import sys
import time
from contextlib import suppress
from pathlib import Path

from support.commands import ROOT, wait_for

sys.path.insert(0, str(ROOT / "bench"))

import harness  # noqa: E402
import race  # noqa: E402


def run_of(number, name, ranks, **quantities):
    return {"round": number, "name": name, "ranks": ranks, "load": 0.5, "exit": 0, **quantities}


def test_ratios_are_of_runs_of_the_same_round():
    page = race.report(
        [
            run_of(0, "tutorial", 1, speed=100, rss=800, wall=20.0),
            run_of(0, "Lockstep", 1, speed=200, rss=600, wall=10.0),
            run_of(1, "tutorial", 1, speed=50, rss=800),
            run_of(1, "Lockstep", 1, speed=75, rss=600),
            run_of(2, "tutorial", 1, speed=10, rss=800),
            run_of(0, "minimal", 1, first_step=2.0),
            run_of(0, "start by python", 1, first_step=2.2),
            run_of(0, "8 commands", 2, wall=40.0),
            run_of(0, "sweep by launch=torchrun", 2, wall=20.0),
            run_of(0, "--help", 1, wall=0.25),
        ],
        race.Settings("data"),
        "torch 2",
    )
    for row in (
        "| Lockstep | 1 | tutorial | 1 | 137.50 (75.00-200.00) | 1.75 (1.50-2.00) | - | - | - | - | 10.00 | 0.50 |",
        "| start by python | 1 | minimal | 1 | 2.20 | 1.10 |",
        "| sweep by launch=torchrun | 2 | 8 commands | 2 | 20.00 | 0.50 |",
        "| Lockstep | 1 | tutorial | 1 | 600 (600-600) | 0.75 (0.75-0.75) | - | - | - | - |",
        "| --help | 1 | 0.25 |",
    ):
        assert row in page
    assert "Training, processes: 2" not in page


def test_a_time_is_the_slowest_ranks_and_cpu_time_is_everybodys():
    lap = {"seconds": 2.0, "cpu": 1.0, "sent": 0, "samples": 100}
    slow = lap | {"seconds": 4.0, "cpu": 3.0}
    same = {"evaluation": [lap], "rss": 10.0, "accuracy": 0.5, "first_step": 12.0}
    ranks = [
        same | {"training": [lap, lap], "bare DDP": [lap, lap]},
        same | {"training": [slow, lap], "bare DDP": [lap, lap]},
    ]
    found = race.figures(ranks, began=10.0)
    assert found["speed"] == 200 / 6
    assert found["evaluation"] == 50
    assert found["cpu"] == 1000 * 6 / 200
    assert found["first_step"] == 2.0
    assert found["of bare DDP"] == (2 / 4 + 1) / 2


def test_rounds_take_turns_in_being_first():
    order = []
    measure = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    found = harness.interleave(measure, 3)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_command_at_its_limit_ends_with_its_processes_of_other_sessions(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "of_the_user")
    words, began = "echo $PYTHONPATH; setsid sleep 60 & echo $! > left; wait", time.monotonic()
    assert harness.run_on_terminal(["bash", "-c", words], tmp_path, limit=1) == 124
    assert time.monotonic() - began < 50  # its output would end with the last process that holds the terminal
    assert (tmp_path / "console.log").read_text().strip().endswith(":of_the_user")
    left = Path("/proc") / (tmp_path / "left").read_text().strip() / "cmdline"

    def has_ended() -> bool:
        with suppress(OSError):
            return not left.read_bytes()  # a zombie has no words
        return True

    wait_for(has_ended, "end of the process", limit=5)
