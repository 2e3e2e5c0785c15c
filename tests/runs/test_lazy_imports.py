"""What is not imported until it is needed, and Python's garbage collector."""

import gc
import sys
from typing import Any

import pytest

from lockstep.tasks.classification import Classification
from support.commands import ROOT, TRAIN

COMPILED = """
import sys, torch
from lockstep.distributed.lazy_dynamo import postpone_dynamo

postpone_dynamo()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [0.5, 0.5, 0.5]
double = torch._dynamo.disable(lambda x: 2 * x)
triple = torch._dynamo.disable(recursive=False, reason="a test")(lambda x: 3 * x)
assert (double(2), triple(2)) == (4, 6)
assert "torch._dynamo.convert_frame" not in sys.modules

compiled = torch.compile(lambda x: x.sin() + 1, backend="aot_eager")
assert torch.equal(compiled(weight.detach()), weight.detach().sin() + 1)
assert torch._dynamo is sys.modules["torch._dynamo"] and "torch._dynamo.convert_frame" in sys.modules
mixed = torch.compile(lambda x: double(x) + triple(x), backend="eager")
assert mixed(torch.ones(1)).item() == 5
assert torch._dynamo.utils.counters["graph_break"]  # both stay uncompiled
optimizer.zero_grad()  # torch excludes it from compilation, this time by the real torch._dynamo
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable._torchdynamo_disable
"""

SUBMODULE = """
import torch
from lockstep.distributed.lazy_dynamo import postpone_dynamo

postpone_dynamo()
from torch._dynamo.config import recompile_limit
import torch._dynamo.utils
assert recompile_limit and torch._dynamo.utils.counters is not None
"""


@pytest.mark.parametrize("script", [COMPILED, SUBMODULE], ids=["compiled", "submodule"])
def test_the_compiler_is_imported_when_it_is_asked_for(start, script):
    start(sys.executable, "-c", script, PYTHONPATH=ROOT / "src").finish()


def test_a_run_that_compiles_nothing_does_not_import_the_compiler(start):
    imported = start(sys.executable, "-X", "importtime", TRAIN, "model=mlp", "trainer.max_steps=1").finish().output
    modules = [line.split()[-1] for line in imported.splitlines() if line.startswith("import time")]
    assert "torch" in modules
    assert not [module for module in modules if module.startswith(("torch._dynamo", "torch._inductor"))]


class CollectorTask(Classification):
    """Prints, in a step, what Python's garbage collector does."""

    def __call__(self, *args: Any) -> Any:
        print(f"collects: {gc.isenabled()}, excludes the imports: {gc.get_freeze_count() > 100_000}", flush=True)
        return super().__call__(*args)


@pytest.mark.parametrize("launch", ["env", "fork", "torchrun"])
def test_the_garbage_collector_excludes_what_was_imported(train, tmp_path, launch):
    options = [f"launch={launch}", "model=mlp", "trainer.max_steps=1", f"hydra.run.dir={tmp_path}"]
    target = "task._target_=test_lazy_imports.CollectorTask"
    run = train(*options, target, PYTHONPATH=f"{ROOT}/tests/runs:{ROOT}/tests")
    assert "collects: True, excludes the imports: True" in run.output
    assert "False" not in run.output
