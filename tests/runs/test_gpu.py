"""On a GPU: a rank over nccl, a run that goes on, there and on the CPU, and a host that waits for nothing."""

import os

import pytest
import torch

from pretend_gpu.scenarios import SCENARIOS, small_training
from support.commands import PYTHON_TRAIN, TORCHRUN, TRAIN, ema
from support.configs import composed
from support.digits import FEW
from support.run_folders import read_log
from support.worlds import distance, in_world, same_bits, train, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL = ["model=mlp", "logger=[]", FEW, "scheduler=constant", "optimizer=adamw"]


STARTERS = [[*TORCHRUN, "--standalone", "--nproc_per_node=1", TRAIN]]
STARTERS += [[*PYTHON_TRAIN, "backend=nccl", f"launch={way}", "launch.nproc_per_node=1"] for way in ("fork", "spawn")]


@pytest.mark.parametrize("command", STARTERS, ids=["torchrun", "fork", "spawn"])
def test_one_rank_trains_over_nccl(start, command):
    run = start(*command, *SMALL, "trainer.epochs=1").finish()
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


def train_on_first_gpu(cfg):
    """A training whose ranks are all on one GPU, over gloo: NCCL refuses that."""
    from lockstep.distributed import world

    os.environ["LOCAL_RANK"] = "0"  # from which torch's meshes choose a GPU
    world.choose_device = lambda *_: torch.device("cuda", 0)
    return train(cfg)


# Those of one process want two GPUs, and the ranks of the parameter server take steps in any order.
TRAININGS = [name for name in SCENARIOS if not name.startswith(("model_parallel", "data_parallel", "async_"))]
NOT_ALONE = ("pipeline", "tensor_parallel")
# gloo of torch 2.11 cannot send, scatter or gather tensors of a GPU: the process aborts, or gets SIGSEGV.
NOT_OVER_GLOO = ("gradient_sync=ring", "gradient_sync=powersgd", "pipeline", "tensor_parallel", "fsdp")
CASES = [(name, 1) for name in TRAININGS if name not in NOT_ALONE]
CASES += [(name, 2) for name in TRAININGS if not name.startswith(NOT_OVER_GLOO)]
ROUNDED = ("fp16", "bf16", "muon")  # each device rounds in its own order


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_training_on_a_gpu_is_that_of_the_cpu(name, ranks, tmp_path):
    """One rank over nccl; two over gloo, on one GPU."""
    rounds = any(kind in name for kind in ROUNDED)
    words = [*SCENARIOS[name][1], *([] if rounds else ["trainer.precision=fp64"])]
    on_gpu, backend = (train, "nccl") if ranks == 1 else (train_on_first_gpu, "gloo")
    in_world(ranks, on_gpu, small_training(tmp_path / "gpu", *words, backend=backend))
    in_world(ranks, train, small_training(tmp_path / "cpu", *words, backend="gloo"))
    assert distance(weights(tmp_path / "cpu"), weights(tmp_path / "gpu")) < (5e-2 if rounds else 1e-9)


@pytest.mark.parametrize("words", [[], ["optimizer=adamw", "trainer.max_grad_norm=0.5", "scheduler=one_cycle"]])
def test_a_recorded_step_has_the_bits_of_an_ordinary_one(words, tmp_path):
    for folder, warmup in (("graphed", 3), ("ordinary", 10**6)):
        step = ["step=cuda_graph", f"step.warmup={warmup}", "trainer.max_steps=40", "trainer.deterministic=true"]
        in_world(1, train, small_training(tmp_path / folder, *words, *step, backend="nccl"))
    assert distance(weights(tmp_path / "graphed"), weights(tmp_path / "ordinary")) == 0


QUIET = ["trainer.epochs=2", "logging.every=1000", "logger=[]"]
SHIFT_FLIP = "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}"
STRICT = [
    [],
    ["trainer.gradient_accumulation_steps=2", "trainer.max_grad_norm=1", ema(0.9), "optimizer=adamw", SHIFT_FLIP],
    ["sync_bn=on", "trainer.precision=bf16"],
    ["trainer.precision=fp16"],
    ["trainer.compile=reduce-overhead", "trainer.precision=bf16"],
]


def train_strictly(cfg):
    """A training during which torch refuses every wait of the host for the device."""
    from lockstep.data.loader import Loader
    from lockstep.training import loop

    plain, end_epoch = Loader.batches, loop.end_epoch

    def strict(*arguments, **options):
        for batch in plain(*arguments, **options):
            torch.cuda.set_sync_debug_mode("error")  # the first permutation may be waited for, once
            yield batch

    def loose(*arguments):
        torch.cuda.set_sync_debug_mode("default")
        return end_epoch(*arguments)

    Loader.batches, loop.end_epoch = strict, loose
    return train(cfg)


@pytest.mark.parametrize("overrides", STRICT)
def test_no_step_waits_for_the_gpu(tmp_path, overrides):
    (accuracy,) = in_world(1, train_strictly, composed(f"run_dir={tmp_path}", *QUIET, *overrides))
    assert accuracy > 0.5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_to_the_numbers_of_one(train, tmp_path):
    halves = ["trainer.precision=fp64", "trainer.epochs=2", "model=toy_parallel", "trainer.batch_size=200"]
    plain = [*halves, "backend=nccl", "trainer.deterministic=true"]
    train(*plain, "hydra.run.dir=one")
    strategies = {
        "copies": ["strategy=data_parallel", "strategy.first_share=0.5"],
        "halves": ["strategy=model_parallel"],
    }
    for name, more in strategies.items():
        train(*plain, *more, f"hydra.run.dir={name}")
        assert distance(weights(tmp_path / "one"), weights(tmp_path / name)) < 1e-9
