"""What is not imported until it is needed, and Python's garbage collector."""

import gc
import re
import signal
import sys
from pathlib import Path

import pytest

from lockstep.tasks.tasks import CrossEntropy
from support.commands import PYTHON_TRAIN, ROOT, TRAIN, ranks_under, wait_for

pytestmark = pytest.mark.new_process


def test_torchvision_is_imported_for_its_models_only_and_tensorboard_for_its_logger(start):
    words = ["model=mlp", "trainer.max_steps=1", "logger=[console]", "hydra.run.dir=run"]
    run = start(sys.executable, "-X", "importtime", TRAIN, *words).finish()
    modules = {line.split()[-1] for line in run.output.splitlines() if line.startswith("import time")}
    assert "torch" in modules
    assert not [one for one in modules if re.search(r"^torchvision$|tensorboard|^lockstep\.tasks\.reports$", one)]
    assert not list((run.cwd / "run").glob("events.*"))


class CollectorTask(CrossEntropy):
    """Prints, in a step, what Python's garbage collector does."""

    def __call__(self, *args):
        print(f"collects: {gc.isenabled()}, excludes the imports: {gc.get_freeze_count() > 100_000}", flush=True)
        return super().__call__(*args)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
def test_the_collector_excludes_what_was_imported_and_ranks_share_the_imports_of_their_parent(start, tmp_path):
    words = ["launch=fork", "model=mlp", "trainer.epochs=1000", "hydra.run.dir=run"]
    words += ["task._target_=test_lazy_imports.CollectorTask"]
    run = start(*PYTHON_TRAIN, *words, PYTHONPATH=f"{ROOT}/tests/runs:{ROOT}/tests")
    wait_for(lambda: (tmp_path / "run/snapshots").is_dir(), "the training")
    ranks = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in ranks_under(run.process.pid)]
    private = [sum(map(int, re.findall(r"Private_\w+: +(\d+)", rank))) for rank in ranks]
    run.process.send_signal(signal.SIGTERM)
    run.finish(75)
    assert "collects: True, excludes the imports: True" in run.output
    assert "False" not in run.output
    assert len(ranks) == 2
    assert max(private) < 150_000, private  # kB; 380,000 where they import torch
