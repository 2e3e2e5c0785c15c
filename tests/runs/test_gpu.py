"""On a GPU: a rank over nccl, and a run that goes on, there and on the CPU. See test_host_never_waits.py, too."""

from typing import Any

import pytest
import torch

from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN
from support.configs import composed
from support.run_folders import read_log
from support.worlds import distance, in_world, same_bits, train, weights

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


def train_on_first_gpu(cfg: Any) -> float:
    """A training whose ranks are all on one GPU, over gloo: NCCL refuses that."""
    from lockstep.distributed import world

    world.set_up_device = lambda *_: torch.device("cuda", 0)
    return train(cfg)


@pytest.mark.parametrize(
    "overrides",
    [["model=mlp"], ["model=convnet", "sync_bn=on"], ["model=mlp", "strategy=fsdp"]],
    ids=["ddp", "sync_bn", "fsdp"],
)
def test_two_ranks_on_one_gpu_train_to_the_numbers_of_the_cpu(tmp_path, overrides):
    exact = ["backend=gloo", "trainer.precision=fp64", "trainer.epochs=2", "dataset.train.train=false", "logger=[]"]
    for name, function in {"gpu": train_on_first_gpu, "cpu": train}.items():
        in_world(2, function, composed(f"run_dir={tmp_path}/{name}", *exact, *overrides))
    assert distance(weights(tmp_path / "cpu"), weights(tmp_path / "gpu")) < 1e-9
