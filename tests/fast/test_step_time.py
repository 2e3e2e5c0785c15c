"""The formulas of step times (bench/scaling.py) end where textbooks do."""

import math
import sys

import pytest

from support.commands import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import scaling  # noqa: E402
from scaling import Machine, Wire, Work  # noqa: E402

WIRE = Wire(latency=1e-5, bandwidth=1e9)
MACHINE = Machine(WIRE, WIRE, local=1, spread=0.0)
WORK = Work(fixed=0.0, each=1e-3, buckets=(1e8,) * 4, groups=10, stages=8, micro_batches=8, cut=1e3)


@pytest.mark.parametrize("ranks", [2, 4, 8, 4096])
def test_collectives_send_the_bytes_of_the_textbook(ranks):
    free = Wire(0.0, 1.0)  # a byte a second: seconds are bytes
    assert scaling.ring(free, 1e6, ranks) == pytest.approx(2 * (ranks - 1) / ranks * 1e6)
    assert scaling.tree(free, 1e6, ranks) == pytest.approx(2 * (ranks - 1) / ranks * 1e6)
    assert scaling.server(free, 1e6, ranks) == pytest.approx(2 * (ranks - 1) * 1e6)
    late = Wire(1.0, math.inf)  # a second a message: seconds are messages after one another
    assert scaling.ring(late, 1e6, ranks) == 2 * (ranks - 1)
    assert scaling.tree(late, 1e6, ranks) == 2 * math.log2(ranks)
    assert scaling.server(late, 1e6, ranks) == 2


def test_nodes_add_up_their_own_gradients_first():
    eight = Machine(Wire(0.0, 100.0), Wire(0.0, 1.0), local=8, spread=0.0)
    assert eight.combine(scaling.ring, 8e6, 64) == pytest.approx(2 * 7 / 8 * 8e6 / 100 + 2 * 7 / 8 * 1e6)
    half = eight.combine(scaling.ring, 8e6, 64) / 2
    assert eight.combine(scaling.gather, 8e6, 64) == pytest.approx(half)


def test_a_backward_pass_hides_all_but_the_last_bucket():
    assert scaling.overlapped(1.0, 2.0, (1.0,) * 4, lambda size: 0.25) == pytest.approx(3.25)
    assert scaling.overlapped(1.0, 2.0, (1.0,) * 4, lambda size: 1.0) == pytest.approx(1 + 0.5 + 4)


def test_a_pipeline_has_the_bubble_of_gpipe():
    silent = Machine(Wire(0.0, math.inf), Wire(0.0, math.inf), 1, 0.0)
    for ranks in (2, 4, 8):
        found = scaling.efficiency(scaling.pipeline, WORK, silent, 64, ranks, weak=True)
        assert found == pytest.approx(8 / (8 + ranks - 1))
    assert scaling.pipeline(WORK, silent, 64, 9) == math.inf


def test_the_slowest_of_many_is_the_expected_maximum():
    spread = 0.01  # so small that the log-normal is normal; the mean maximum of 2 and of 3 normals is known
    assert (scaling.slowest(2, spread) - 1) / spread == pytest.approx(1 / math.sqrt(math.pi), rel=0.02)
    assert (scaling.slowest(3, spread) - 1) / spread == pytest.approx(1.5 / math.sqrt(math.pi), rel=0.02)
    assert 3.4 < (scaling.slowest(4096, spread) - 1) / spread < 3.8
