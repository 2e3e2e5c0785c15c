"""Every contender of `make bench` runs and measures itself, and the tables are made of what they measured."""

import os
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import race  # noqa: E402

TINY = race.Settings(os.environ.get("LOCKSTEP_DATA", ""), samples=256, test_samples=256, epochs=1, pairs=1)
NEEDS = {"Lightning": "lightning", "Accelerate": "accelerate"}
ALSO = {("Lockstep beside its floor, fp32", 1), ("Lockstep beside its floor, bf16, gloo", 2), ("leanest", 1)}  # the others differ by an option
FIELD = [
    each for group in race.contestants(TINY) for each in group
    if "train" in each.parts and each.name != "Lockstep, bf16" or (each.name, each.ranks) in ALSO
]  # fmt: skip


@pytest.mark.skipif("LOCKSTEP_DATA" not in os.environ, reason="LOCKSTEP_DATA does not say where MNIST lies")
@pytest.mark.parametrize("contestant", FIELD, ids=lambda each: f"{each.name}-{each.ranks}")
def test_a_contender_runs_and_measures_itself(contestant, tmp_path):
    needs = NEEDS.get(contestant.name)
    if needs and not race.installed(needs):
        pytest.skip(f"{needs} is not installed; type pip install -r requirements-bench.txt")
    found = race.run(contestant, tmp_path / "run")
    assert 0 < found["first_step"] < found["wall"]
    assert 50 < found["private"] <= found["rss"] < 5000
    if "train" in contestant.parts:
        assert 0 < found["accuracy"] < 1
        assert found["evaluation"] > 0
    if contestant.parts & {"train", "floor"}:
        assert found["speed"] == found["first_epoch"] > 0
        assert found["cpu"] > 0
        assert "later_epochs" not in found
    floors = {f"of {name}" for name, (ranks, *_) in race.FLOORS.items() if ranks == contestant.ranks and "floor" in contestant.parts}
    assert {key for key in found if key.startswith("of ")} == floors
    assert all(0 < found[key] < 10 for key in floors)


def measured(number, name, ranks, **quantities):
    return {"round": number, "name": name, "ranks": ranks, "load": 0.5, "exit": 0, **quantities}


def test_ratios_are_of_runs_of_the_same_round():
    runs = [
        measured(0, "tutorial", 1, speed=100, rss=800), measured(0, "Lockstep", 1, speed=200, rss=800),
        measured(1, "tutorial", 1, speed=50, rss=800), measured(1, "Lockstep", 1, speed=75, rss=800),
        measured(2, "tutorial", 1, speed=10, rss=800),
        measured(0, "leanest", 1, first_step=2.0), measured(0, "start by python", 1, first_step=2.2),
        measured(0, "8 commands", 2, wall=40.0), measured(0, "sweep by launch=torchrun", 2, wall=20.0),
        measured(0, "--help", 1, wall=0.25),
    ]  # fmt: skip
    page = race.report(runs, TINY)
    assert "| samples/s against the tutorial, 1 process, fp32 | 1.75 (1.50-2.00) | >= 1.6 | >= 1.9 | yes |" in page
    assert "| first step against the leanest, alone | 1.10 | <= 1.15 | - | yes |" in page
    assert "| a sweep by launch=torchrun against 8 commands | 0.50 | <= 0.4 | <= 0.15 | no |" in page
    assert "| seconds of --help | 0.25 | <= 0.6 | <= 0.3 | moonshot |" in page
    assert "Lightning |" not in page
    assert "bf16, 1 process" not in page


def test_parts_that_are_not_there_are_refused(start):
    assert "type --only=" in start(sys.executable, ROOT / "bench" / "race.py", "--only=speed").finish(code=1).output
