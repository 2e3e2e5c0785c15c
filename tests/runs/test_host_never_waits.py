"""A step must never make the host wait for the device: no value of a tensor is read between two log lines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import ema
from support.configs import composed
from support.worlds import distance, in_world, train, weights

READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")
OPTIONS = [
    [],
    ["trainer.gradient_accumulation_steps=2", "trainer.max_grad_norm=1", ema(0.9), "optimizer=adamw",
     "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1,flip:true}"],
    ["sync_bn=on", "trainer.precision=bf16", "model=convnet"],
]  # fmt: skip
QUIET = ["logging.every=1000", "logger=[]"]


def values_read(cfg: Any) -> list[str]:
    """The operations that read a tensor's value, of the steps of an epoch. The CPU is treated as a GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from lockstep.training import loop, nan

    nan.reads_at_once = lambda device, action: False

    read: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation.name().partition("::")[2].partition(".")[0] in READS:
                read.append(operation.name())
            return operation(*args, **kwargs or {})

    train_epoch = loop.train_epoch

    def watched(*arguments: Any) -> int:
        with Watch():
            return train_epoch(*arguments)

    loop.train_epoch = watched
    with Watch():
        torch.ones(1).item()
    assert len(read) == 1  # it does notice
    read.clear()
    train(cfg)
    return read


@pytest.mark.parametrize("overrides", OPTIONS, ids=["plain", "all", "sync_bn"])
def test_no_step_reads_a_value_back(tmp_path: Path, overrides: list[str]) -> None:
    cfg = composed(f"run_dir={tmp_path}", "trainer.epochs=1", *QUIET, *overrides)
    assert in_world(2, values_read, cfg) == [[], []]


def train_strictly(cfg: Any) -> float:
    """A training during which torch refuses every wait of the host for the device."""
    from lockstep.data.loader import Loader

    plain = Loader.batches

    def strict(*arguments: Any, **options: Any) -> Iterator[Any]:
        try:
            for batch in plain(*arguments, **options):
                torch.cuda.set_sync_debug_mode("error")  # the first permutation may be waited for, once
                yield batch
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Loader.batches = strict  # type: ignore[method-assign]
    return train(cfg)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "overrides", [*OPTIONS, ["trainer.precision=fp16"], ["trainer.compile=reduce-overhead", "trainer.precision=bf16"]]
)
def test_no_step_waits_for_the_gpu(tmp_path: Path, overrides: list[str]) -> None:
    (accuracy,) = in_world(1, train_strictly, composed(f"run_dir={tmp_path}", "trainer.epochs=2", *QUIET, *overrides))
    assert accuracy > 0.5


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_to_the_numbers_of_one(train: Any, tmp_path: Path) -> None:
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
