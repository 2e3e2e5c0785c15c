"""mpirun ends all ranks when one is killed."""

import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest

from support.commands import MPIRUN, ROOT, wait_for
from support.run_folders import has_logged

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun: apt-get install openmpi-bin"),
]


def test_the_command_that_resumes_starts_with_mpirun(start):
    """And a failure in the first step of an epoch names that epoch."""
    words = [
        "model=mlp",
        "model._target_=support.faults.FaultyModel",
        "loader.validation=null",
        "trainer.batch_size=1437",
        "snapshot.every=1steps",
    ]
    run = start(*MPIRUN, *words, FAULT="forward/raise:1:3", PYTHONPATH=ROOT / "tests").finish(1)
    assert "in epoch 3, after step 2, in the phase train" in run.output
    (resume,) = re.findall(r"^resume: (mpirun --allow-run-as-root --oversubscribe -n 2 .*)$", run.output, re.MULTILINE)
    assert start(*shlex.split(resume), PYTHONPATH=ROOT / "tests").finish().output.count("resumed from") == 1


def test_mpirun_ends_all_ranks_when_one_is_killed(start, tmp_path):
    run = start(*MPIRUN, "hydra.run.dir=run", "trainer.epochs=300")
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 1/"), "training")
    first_rank = int((tmp_path / "run" / ".lock").read_text().split()[1])
    pgrep = subprocess.run(["pgrep", "-P", str(run.process.pid)], capture_output=True, text=True)
    group = [int(pid) for pid in pgrep.stdout.split()]
    assert first_rank in group
    os.kill(first_rank, signal.SIGKILL)
    assert run.finish(None).process.returncode not in (0, 75)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in group), "end of the other rank", 20)
