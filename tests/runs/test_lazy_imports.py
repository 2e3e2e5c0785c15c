"""What is not imported until it is needed, and Python's garbage collector."""

import gc
import sys
from typing import Any

import pytest

from lockstep.tasks.classification import Classification
from support.commands import ROOT, TRAIN


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_torchvision_is_imported_for_its_models_only(start, model):
    run = start(sys.executable, "-X", "importtime", TRAIN, f"model={model}", "trainer.max_steps=1")
    modules = [line.split()[-1] for line in run.finish().output.splitlines() if line.startswith("import time")]
    assert "torch" in modules
    assert ("torchvision" in modules) == (model == "resnet18")


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
