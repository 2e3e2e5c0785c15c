"""A step must never make the host wait for the device: no value of a tensor is read but by an exchange of the ranks,
whose result waits for the next one."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

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


def delay_exchanges() -> None:
    """As on a GPU, also on a slow machine, which would read at once."""
    from lockstep.training import exchange

    create = exchange.Exchange.__init__

    def delayed(self: Any, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options | {"delayed": True})

    exchange.LONG = math.inf
    exchange.Exchange.__init__ = delayed  # type: ignore[method-assign]


def values_read(cfg: Any) -> list[str]:
    """The operations that read a tensor's value, of the epochs' steps and what lies between them. The CPU is treated as
    a GPU. Without what the ranks tell each other: it is read an exchange later, and at an epoch's end."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from lockstep.training import exchange, loop

    read: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation.name().partition("::")[2].partition(".")[0] in READS:
                read.append(operation.name())
            return operation(*args, **kwargs or {})

    def unwatched(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with _disable_current_modes():
                return function(*arguments)

        return call

    begin_epoch, end_epoch, watch = loop.begin_epoch, loop.end_epoch, Watch()

    def begin(*arguments: Any) -> Any:
        begin_epoch(*arguments)
        watch.__enter__()

    def end(*arguments: Any) -> Any:
        watch.__exit__(None, None, None)
        return end_epoch(*arguments)

    loop.begin_epoch, loop.end_epoch = begin, end
    delay_exchanges()
    exchange.Exchange.drain = unwatched(exchange.Exchange.drain)  # type: ignore[method-assign]
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


def exchanges_read(cfg: Any) -> list[tuple[int, int]]:
    """(the step of an exchange, the step after which its result is read) of each one that is read in an epoch."""
    from lockstep.training import exchange

    found: list[tuple[int, int]] = []
    read = exchange.Exchange.drain

    def noted(self: Any) -> None:
        if self.pending is not None:
            found.append((self.pending[2], self.run.progress.step))
        read(self)

    delay_exchanges()
    exchange.Exchange.drain = noted  # type: ignore[method-assign]
    train(cfg)
    return found


def test_what_ranks_tell_each_other_is_read_at_the_next_exchange(tmp_path: Path) -> None:
    words = ["trainer.epochs=1", "trainer.batch_size=50", "logging.every=4", "logger=[]"]
    for found in in_world(2, exchanges_read, composed(f"run_dir={tmp_path}", *words)):
        *in_epoch, (_, last) = found
        assert len(in_epoch) >= last // 4 - 1
        for (_, read_at), (step, _) in itertools.pairwise(found):
            assert read_at == step  # the next one begins
        assert all(read_at > step for step, read_at in in_epoch)


def train_strictly(cfg: Any) -> float:
    """A training during which torch refuses every wait of the host for the device."""
    from lockstep.data.loader import Loader
    from lockstep.training import loop

    plain, end_epoch = Loader.batches, loop.end_epoch

    def strict(*arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in plain(*arguments, **options):
            torch.cuda.set_sync_debug_mode("error")  # the first permutation may be waited for, once
            yield batch

    def loose(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return end_epoch(*arguments)

    Loader.batches, loop.end_epoch = strict, loose  # type: ignore[method-assign]
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
