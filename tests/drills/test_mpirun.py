"""The command that goes on after a failure under mpirun. What it says of the failures themselves: test_faults.py."""

import re
import shlex
import shutil

import pytest

from support.commands import MPIRUN, ROOT

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
