"""Options that a strategy or a gradient sync cannot combine are refused before a rank starts, with what to type."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from lockstep.config.check import instantiate
from lockstep.errors import ConfigError
from lockstep.launchers.env import EnvLauncher
from lockstep.preflight import job_spec, preflight
from support.configs import composed

THREE = ["launch=spawn", "launch.nproc_per_node=3"]
TENSOR = ["strategy=tensor_parallel", "model=mlp"]
ASYNC = ["strategy=async_parameter_server", *THREE]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["strategy=data_parallel", "launch=spawn"], "type strategy=ddp"),
        (["strategy=data_parallel", "sync_bn=on"], "type sync_bn=off"),
        (["strategy=data_parallel", "trainer.compile=true"], "type trainer.compile=false"),
        (["strategy=fsdp", "strategy.replicate=2", *THREE], "of two or more of 3 ranks; type strategy.replicate=1"),
        (["strategy=pipeline", "sync_bn=on"], "type sync_bn=off"),
        (["strategy=pipeline", "trainer.precision=fp16"], "type trainer.precision=bf16"),
        (["strategy=pipeline", "trainer.compile=true"], "type trainer.compile=false"),
        ([*TENSOR, "strategy.replicate=2", *THREE], "type strategy.replicate=1 and strategy.shard=1, or strategy=ddp"),
        ([*TENSOR, "strategy.replicate=3", *THREE], "type strategy.replicate=1 and strategy.shard=1, or strategy=ddp"),
        ([*TENSOR, "gradient_sync=ring"], "type gradient_sync=auto, or strategy=ddp"),
        ([*TENSOR, "sync_bn=on"], "type sync_bn=off"),
        ([*TENSOR, "trainer.precision=fp16"], "type trainer.precision=bf16"),
        ([*TENSOR, "trainer.compile=true"], "type trainer.compile=false"),
        (["strategy=virtual_ranks", "gradient_sync=ring"], "type gradient_sync=auto, or strategy=ddp"),
        (["strategy=virtual_ranks", "sync_bn=on"], "type sync_bn=off"),
        (["strategy=virtual_ranks", "trainer.gradient_accumulation_steps=2"], "gradient_accumulation_steps=1"),
        (["strategy=virtual_ranks", *THREE], "type strategy.count=6"),
        (["strategy=fsdp", "gradient_sync=bf16"], "type gradient_sync=auto"),
        ([*ASYNC, "watch.nan=skip"], "type watch.nan=stop"),
        (["gradient_sync=powersgd", "watch.nan=skip"], "type watch.nan=stop"),
        (["trainer.batch_size=2", *THREE], "type trainer.batch_size=3"),
        (["strategy=async_parameter_server"], "type launch=spawn launch.nproc_per_node=3"),
        ([*ASYNC, "sync_bn=on"], "type sync_bn=off"),
        ([*ASYNC, "gradient_sync=ring"], "type gradient_sync=auto, or strategy=ddp"),
        ([*ASYNC, "trainer.deterministic=true"], "type trainer.deterministic=false"),
        ([*ASYNC, "trainer.precision=fp16"], "type trainer.precision=bf16"),
        ([*ASYNC, "snapshot.every=5steps"], "type snapshot.every=1epochs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_refused(typed: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preflight(composed(*typed))


@pytest.mark.parametrize(
    "typed",
    [
        ["strategy=model_parallel", "model=toy_parallel", "gradient_sync=bf16", *THREE],
        ["strategy=pipeline", "model=mlp", "model.depth=3", "trainer.batch_size=2", *THREE],
        ["strategy=virtual_ranks", "strategy.count=6", *THREE],
        ["strategy=fsdp", "watch.nan=skip", "optimizer=muon", *THREE],
        [*TENSOR, "strategy.parallelize_plan=[{1:colwise},{4:rowwise},{7:gathered}]", "watch.nan=skip", "launch=spawn"],
        [*ASYNC, "trainer.batch_size=2"],  # of which each of the two workers takes a whole one
    ],
    ids=" ".join,
)
def test_what_goes_together_is_accepted(typed: list[str]) -> None:
    preflight(composed(*typed))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_virtual_ranks_on_gpus_need_deterministic_kernels(device_type: str) -> None:
    strategy = instantiate(composed("strategy=virtual_ranks").strategy)
    with nullcontext() if device_type == "cpu" else pytest.raises(ConfigError, match="type trainer.deterministic=true"):
        strategy.validate(replace(job_spec(composed(), EnvLauncher()), device_type=device_type))
    deterministic = job_spec(composed("trainer.deterministic=true"), EnvLauncher())
    strategy.validate(replace(deterministic, device_type=device_type))
