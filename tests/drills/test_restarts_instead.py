"""launch.recover=live where another program has started the ranks: its own restart stays, and the log says so."""

import os
import signal

import pytest

from support.commands import MPIRUN, TORCHRUN, TRAIN, skip_without_mpirun, wait_for
from support.live_ranks import rank_zero
from support.run_folders import has_logged, read_log

pytestmark = pytest.mark.drill

COMMANDS = {
    "torchrun": [*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=1", TRAIN],
    "mpirun": MPIRUN,
}
INSTEAD = {
    "torchrun": "all ranks restart from the newest snapshot, up to 1 times",
    "mpirun": "the run ends, and its report has the command that goes on",
}


@pytest.mark.parametrize("starter", COMMANDS)
def test_the_log_says_why_no_rank_is_replaced_and_what_happens_instead(start, tmp_path, starter):
    skip_without_mpirun(starter)
    words = ["launch.recover=live", "model=mlp", "trainer.epochs=40", "snapshot.every=1epochs", "hydra.run.dir=run"]
    run = start(*COMMANDS[starter], *words)
    wait_for(lambda: has_logged(tmp_path / "run", "epoch 2/"), "second epoch")
    os.kill(rank_zero(tmp_path / "run"), signal.SIGKILL)
    run.finish(0 if starter == "torchrun" else None)
    log = read_log(tmp_path / "run")
    assert f"{starter} has started these, so no rank is replaced. If one dies, {INSTEAD[starter]}" in log
    assert ("resumed from" in log) == (starter == "torchrun")
    assert ("resume: mpirun" in run.output) == (starter == "mpirun")
