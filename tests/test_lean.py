"""What is not imported until it is needed, and what then becomes of it."""

import gc
import sys

import pytest

from conftest import ROOT

LATE = """
import sys, torch
from lockstep import lean

lean.put_off_dynamo()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [0.5, 0.5, 0.5]
assert "torch._dynamo.convert_frame" not in sys.modules

compiled = torch.compile(lambda x: x.sin() + 1, backend="aot_eager")
assert torch.equal(compiled(weight.detach()), weight.detach().sin() + 1)
assert torch._dynamo is sys.modules["torch._dynamo"] and "torch._dynamo.convert_frame" in sys.modules
optimizer.zero_grad()  # decorated by torch to be left alone by the compiler, this time by the real one
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable._torchdynamo_disable
"""

SUBMODULE = """
import torch
from lockstep import lean

lean.put_off_dynamo()
from torch._dynamo.config import recompile_limit
import torch._dynamo.utils
assert recompile_limit and torch._dynamo.utils.counters is not None
"""


def test_the_compiler_comes_when_somebody_compiles(start):
    start(sys.executable, "-c", LATE, PYTHONPATH=ROOT / "src").finish()


def test_the_compiler_comes_when_somebody_imports_a_part_of_it(start):
    start(sys.executable, "-c", SUBMODULE, PYTHONPATH=ROOT / "src").finish()


def train(run, loader, after_step):
    """What conf calls `loop`: it tells of Python's collector, and trains."""
    from lockstep import loop

    print(f"collects: {gc.isenabled()}, leaves alone: {gc.get_freeze_count() > 100_000}")
    return loop.train(run, loader, after_step)


@pytest.mark.parametrize("launch", ["env", "fork", "torchrun"])
def test_the_collector_leaves_alone_what_was_imported(start, tmp_path, launch):
    run = start(
        sys.executable, ROOT / "src" / "train.py", f"launch={launch}", "trainer.max_steps=1", "loop._target_=test_lean.train",
        f"hydra.run.dir={tmp_path}", PYTHONPATH=ROOT / "tests",
    )  # fmt: skip
    assert "collects: True, leaves alone: True" in run.finish().output
