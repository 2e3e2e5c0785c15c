"""The arithmetic of the benchmarks: ratios, turns, limits; and formulas of step times that end where textbooks do."""

import math
import sys

import pytest

from support.commands import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import race  # noqa: E402
import scaling  # noqa: E402
from scaling import Machine, Wire, Work  # noqa: E402


def test_ratios_are_of_runs_of_the_same_round():
    runs = {
        ("train", 1): {
            "tutorial": [{"speed": 100, "wall": 20.0}, {"speed": 50}, {"speed": 10}],
            "Lockstep": [{"speed": 200, "wall": 10.0}, {"speed": 75}, {}],
        },
        ("memory", 1): {"tutorial": [{"rss": 800}] * 2, "Lockstep": [{"rss": 600}] * 2},
        ("startup", 1): {"minimal": [{"first_step": 2.0}], "start by python": [{"first_step": 2.2}]},
        ("sweep", 2): {"8 commands": [{"wall": 40.0}], "sweep by launch=torchrun": [{"wall": 20.0}]},
        ("help", 1): {"--help": [{"wall": 0.25}]},
    }
    for ones in (ones for found in runs.values() for ones in found.values()):
        ones[:] = [one and one | {"load": 0.5} for one in ones]
    groups = race.groups(race.Settings("data"))
    page = race.report([(group, runs.get((group.part, group.ranks), {})) for group in groups], race.Settings("data"))
    for row in (
        "| Lockstep | 1 | tutorial | 137.50 (75.00-200.00) | 1.75 (1.50-2.00) | - | - | - | - | 10.00 | 0.50 |",
        "| start by python | 1 | minimal | 2.20 | 1.10 |",
        "| sweep by launch=torchrun | 2 | 8 commands | 20.00 | 0.50 |",
        "| Lockstep | 1 | tutorial | 600 (600-600) | 0.75 (0.75-0.75) | - | - | - | - |",
        "| --help | 1 | 0.25 |",
    ):
        assert row in page
    assert "Training, processes: 2" not in page


def test_times_of_steps_end_where_textbooks_do():
    free, late = Wire(0.0, 1.0), Wire(1.0, math.inf)  # a byte a second, and a second a message
    for ranks in (2, 4, 8, 4096):
        share = 2 * (ranks - 1) / ranks * 1e6
        messages = {"ring": 2 * (ranks - 1), "tree": 2 * math.log2(ranks), "server": 2}
        for name, size in {"ring": share, "tree": share, "server": share * ranks}.items():
            assert getattr(scaling, name)(free, 1e6, ranks) == pytest.approx(size)
            assert getattr(scaling, name)(late, 1e6, ranks) == messages[name]
    eight = Machine(Wire(0.0, 100.0), free, local=8, spread=0.0)  # nodes add up their own gradients first
    whole = 2 * 7 / 8 * 8e6 / 100 + 2 * 7 / 8 * 1e6
    assert scaling.combine(eight, scaling.ring, 8e6, 64) == pytest.approx(whole)
    for seconds, expected in ((0.25, 3.25), (1.0, 5.5)):  # a backward pass hides all but the last bucket
        assert scaling.overlapped(1.0, 2.0, (1.0,) * 4, lambda size, of=seconds: of) == pytest.approx(expected)
    work = Work(fixed=0.0, each=1e-3, buckets=(1e8,) * 4, groups=10, stages=8, micro_batches=8, cut=1e3)
    silent = Machine(Wire(0.0, math.inf), Wire(0.0, math.inf), 1, 0.0)
    for ranks in (2, 4, 8):  # the bubble of GPipe
        found = scaling.efficiency(scaling.pipeline, work, silent, 64, ranks, weak=True)
        assert found == pytest.approx(8 / (8 + ranks - 1))
    assert scaling.pipeline(work, silent, 64, 9) == math.inf
    # So small a spread that the log-normal is normal; the mean maximum of 2 and of 3 normals is known.
    two, three, many = ((scaling.slowest(ranks, 0.01) - 1) / 0.01 for ranks in (2, 3, 4096))
    assert (two, three) == pytest.approx((1 / math.sqrt(math.pi), 1.5 / math.sqrt(math.pi)), rel=0.02)
    assert 3.4 < many < 3.8
