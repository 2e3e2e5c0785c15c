"""What is not imported until it is needed, and Python's garbage collector."""

import gc
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.tasks.tasks import CrossEntropy
from support.commands import PYTHON_TRAIN, ROOT, TRAIN, ranks_under, wait_for

pytestmark = pytest.mark.new_process


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_torchvision_is_imported_for_its_models_only(start, model):
    run = start(sys.executable, "-X", "importtime", TRAIN, f"model={model}", "trainer.max_steps=1")
    modules = [line.split()[-1] for line in run.finish().output.splitlines() if line.startswith("import time")]
    assert "torch" in modules
    assert ("torchvision" in modules) == (model == "resnet18")


class CollectorTask(CrossEntropy):
    """Prints, in a step, what Python's garbage collector does."""

    def __call__(self, *args: Any) -> Any:
        print(f"collects: {gc.isenabled()}, excludes the imports: {gc.get_freeze_count() > 100_000}", flush=True)
        return super().__call__(*args)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
@pytest.mark.parametrize("launch", ["env", "fork"])
def test_the_collector_excludes_what_was_imported_and_ranks_share_the_imports_of_their_parent(start, tmp_path, launch):
    words = [f"launch={launch}", "model=mlp", "trainer.epochs=1000", "hydra.run.dir=run"]
    words += ["task._target_=test_lazy_imports.CollectorTask"]
    run = start(*PYTHON_TRAIN, *words, PYTHONPATH=f"{ROOT}/tests/runs:{ROOT}/tests")
    wait_for(lambda: (tmp_path / "run/snapshots").is_dir(), "the training")
    ranks = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in ranks_under(run.process.pid)]
    private = [sum(map(int, re.findall(r"Private_\w+: +(\d+)", rank))) for rank in ranks]
    run.process.send_signal(signal.SIGTERM)
    run.finish(75)
    assert "collects: True, excludes the imports: True" in run.output
    assert "False" not in run.output
    assert len(ranks) == 2 * (launch == "fork")
    assert max(private, default=0) < 150_000, private  # kB; 380,000 where they import torch
