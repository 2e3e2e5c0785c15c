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

TORCHVISION = """
import sys, torch
from lockstep.distributed.lazy_dynamo import postpone_dynamo

postpone_dynamo()
from torchvision.ops import RoIAlign
from torchvision.ops.roi_align import is_compile_supported
import torch._dynamo.utils as utils
pooled = RoIAlign(2, 1.0, -1)(torch.rand(1, 3, 8, 8), torch.tensor([[0, 0, 0, 4.0, 4.0]]))
assert pooled.shape == (1, 3, 2, 2) and "torch._dynamo.convert_frame" not in sys.modules
assert not hasattr(utils, "__wrapped__") and "torch._dynamo.convert_frame" not in sys.modules
assert is_compile_supported("cpu") and not is_compile_supported("meta")
assert utils.counters is sys.modules["torch._dynamo.utils"].counters and sys.modules["torch._dynamo.utils"] is not utils
compiled = torch.compile(RoIAlign(2, 1.0, -1), backend="aot_eager")
assert compiled(torch.rand(1, 3, 8, 8), torch.tensor([[0, 0, 0, 4.0, 4.0]])).shape == (1, 3, 2, 2)
"""


@pytest.mark.parametrize("script", [COMPILED, SUBMODULE, TORCHVISION], ids=["compiled", "submodule", "torchvision"])
def test_the_compiler_is_imported_when_it_is_asked_for(start, script):
    start(sys.executable, "-c", script, PYTHONPATH=ROOT / "src").finish()


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_a_run_that_compiles_nothing_does_not_import_the_compiler(start, model):
    run = start(sys.executable, "-X", "importtime", TRAIN, f"model={model}", "trainer.max_steps=1")
    modules = [line.split()[-1] for line in run.finish().output.splitlines() if line.startswith("import time")]
    assert "torch" in modules
    assert ("torchvision" in modules) == (model == "resnet18")
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
