"""A step must never make the host wait for the device: what can be told without one, and what only a GPU can tell."""

import pytest
import torch

from conftest import in_world
from test_configs import composed

OPTIONS = [
    [],
    ["trainer.accumulate=2", "trainer.clip_norm=1", "trainer.ema=0.9", "optimizer=adamw", "dataset.augment.pad=1", "dataset.augment.flip=true"],
    ["sync_bn=on", "trainer.precision=bf16", "model=convnet"],
]


def _values_read(folder, *overrides):
    """The operations that read a tensor's value, of a few steps between two log lines."""
    from torch.utils._python_dispatch import TorchDispatchMode

    import train
    from lockstep import loop

    read = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation.name().partition("::")[2].partition(".")[0] in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"):
                read.append(operation.name())
            return operation(*args, **kwargs or {})

    steps = loop.train

    def watched(run, loader, after_step):
        with Watch():
            return steps(run, loader, after_step)

    loop.train = watched
    train.work(composed(f"run_dir={folder}", "trainer.log_every=1000", "trainer.epochs=1", *overrides))
    return read


@pytest.mark.parametrize("overrides", OPTIONS)
def test_no_step_reads_a_value_back(tmp_path, overrides):
    assert in_world(2, _values_read, str(tmp_path), *overrides) == [[], []]


def _strict(folder, *overrides):
    """A training during which torch refuses every wait of the host for the device."""
    import train
    from lockstep import loop

    steps = loop.train

    def strict(run, loader, after_step):
        batches = loader.epoch
        loader.epoch = lambda *place, **more: map(_from_here_on, batches(*place, **more))
        try:
            return steps(run, loader, after_step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _from_here_on(batch):
        torch.cuda.set_sync_debug_mode("error")  # the epoch's permutation may be waited for, once
        return batch

    loop.train = strict
    return train.work(composed(f"run_dir={folder}", "trainer.log_every=1000", "trainer.epochs=2", *overrides))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
@pytest.mark.parametrize("overrides", [*OPTIONS, ["trainer.precision=fp16"], ["trainer.compile=reduce-overhead", "trainer.precision=bf16"]])
def test_no_step_waits_for_the_gpu(tmp_path, overrides):
    (accuracy,) = in_world(1, _strict, str(tmp_path), *overrides)
    assert accuracy > 0.5
