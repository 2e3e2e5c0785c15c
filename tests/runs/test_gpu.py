"""On a GPU: a rank over nccl, and a run that goes on, there and on the CPU. See test_host_never_waits.py, too."""

import pytest
import torch

from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN
from support.run_folders import read_log
from support.worlds import distance, same_bits, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL = ["model=mlp", "logger=[]", "dataset.train.train=false", "scheduler=constant", "optimizer=adamw"]


def test_one_rank_of_torchrun_trains_over_nccl(start):
    run = start(*TORCHRUN, "--standalone", "--nproc_per_node=1", TRAIN, *SMALL, "trainer.epochs=1").finish()
    assert "rank 0 of 1: nccl on cuda" in run.output


def test_a_run_on_a_gpu_goes_on_to_the_same_bits(start, tmp_path):
    repeatable = [*PYTHON_TRAIN, *SMALL, "trainer.deterministic=true"]
    start(*repeatable, "trainer.epochs=4", "hydra.run.dir=whole").finish()
    for epochs in (2, 4):
        start(*repeatable, f"trainer.epochs={epochs}", "hydra.run.dir=parts").finish()
    assert "resumed from" in read_log(tmp_path / "parts")
    assert same_bits(tmp_path / "whole", tmp_path / "parts")


def test_a_run_on_a_gpu_goes_on_on_the_cpu(start, tmp_path):
    exact = [*PYTHON_TRAIN, *SMALL, "trainer.precision=fp64"]
    start(*exact, "trainer.epochs=4", "backend=gloo", "hydra.run.dir=cpu").finish()
    for epochs, backend in ((2, "nccl"), (4, "gloo")):
        start(*exact, f"trainer.epochs={epochs}", f"backend={backend}", "hydra.run.dir=both").finish()
    assert distance(weights(tmp_path / "cpu"), weights(tmp_path / "both")) < 1e-9
