"""Every strategy trains to the numbers of one process, and a snapshot moves between all of them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import StoppedEarly
from support.commands import ON_TEST, ema, wait_for
from support.configs import composed
from support.digits import PAIRS_ON_TEST
from support.run_folders import newest_snapshot
from support.worlds import distance, in_world, train, train_all, weights

# 61 test samples by 20: with three ranks one of them evaluates one more batch than the others.
SMALL = [
    PAIRS_ON_TEST,
    "dataset=random",
    "dataset.samples=61",
    "model=mlp",
    "trainer.batch_size=16",
    "evaluation.batch_size=20",
]
DOUBLE = ["trainer.precision=fp64", "trainer.epochs=2", "optimizer.fused=false", "logger=[]"]
AVERAGED = [*SMALL, *DOUBLE, "optimizer=adamw", "trainer.max_grad_norm=0.3", ema(0.8), "monitor=val/loss"]
IMAGES = [
    ON_TEST, *DOUBLE, "model=convnet", "sync_bn=on", "trainer.batch_size=200", "trainer.gradient_accumulation_steps=2",
    "loader.augment={_target_:lockstep.data.augment.ShiftFlip,pad:1}", "trainer.max_grad_norm=1.0", ema(0.8),
]  # fmt: skip
HALVES = [ON_TEST, *DOUBLE, "model=toy_parallel", "trainer.batch_size=200"]


def trained(size: int, folder: Path, *runs: list[str]) -> list[tuple[float, torch.Tensor]]:
    """[(objective, weights), ...] of `runs`, each a list of overrides, trained one after the other in one world."""
    folders = [folder / f"{size}_{number}" for number in range(len(runs))]
    configs = [composed(f"run_dir={place}", *run) for place, run in zip(folders, runs, strict=True)]
    answers = in_world(size, train_all, configs)
    assert all(answer == answers[0] for answer in answers)
    return list(zip(answers[0], map(weights, folders), strict=True))


def test_every_strategy_trains_to_the_numbers_of_one_process(tmp_path: Path) -> None:
    averaged, images, halves = trained(1, tmp_path, AVERAGED, IMAGES, HALVES)
    fsdp, piped, together = ([f"strategy={name}"] for name in ("fsdp", "pipeline", "model_parallel"))
    one = trained(1, tmp_path / "data_parallel", [*AVERAGED, "strategy=data_parallel"])
    two = trained(2, tmp_path, [*IMAGES, *fsdp], [*HALVES, *together], [*HALVES, *piped, "trainer.max_grad_norm=1e3"])
    three = trained(3, tmp_path, [*AVERAGED, *fsdp, "strategy.reshard_after_forward=false"], [*AVERAGED, *piped])
    four = trained(4, tmp_path, [*AVERAGED, *fsdp, "strategy.replicate=2", "trainer.gradient_accumulation_steps=2"])
    expected = [averaged, images, halves, halves, averaged, averaged, averaged]
    pairs = zip(expected, [*one, *two, *three, *four], strict=True)
    for (objective, values), (found_objective, found) in pairs:
        assert found_objective == pytest.approx(objective, rel=1e-9)
        assert distance(values, found) < 1e-9


def stop_after_two_steps(cfg: Any) -> str:
    """Train two or three steps: be asked to stop after the second."""
    from lockstep.distributed.signals import stop_requested
    from lockstep.training import exchange
    from lockstep.training.step import Step

    exchange.PAUSE = 0.0  # an exchange in every step
    update, steps = Step.update, []

    def update_and_ask(step: Step) -> None:
        update(step)
        steps.append(step.progress.step + 1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(stop_requested, "signal")  # a busy machine delivers it late

    Step.update = update_and_ask  # type: ignore[method-assign]
    with pytest.raises(StoppedEarly):
        train(cfg)
    assert 2 <= len(steps) <= 3  # the vote is counted in the next step, or in an evaluation before it
    return str(cfg.strategy["_target_"].rpartition(".")[2])


def test_a_snapshot_moves_between_strategies_and_world_sizes(tmp_path: Path) -> None:
    from lockstep.snapshots.files import list_snapshots

    moving = [*AVERAGED, "scheduler=one_cycle", "trainer.epochs=12"]  # 48 steps, and seven stops after up to 6
    objective, whole = trained(1, tmp_path, moving)[0]
    cfg = [f"run_dir={tmp_path / 'moved'}", *moving]
    stops = [("data_parallel", 1, "DataParallel"), ("fsdp", 2, "Sharded"), ("ddp", 3, "DDP"), ("fsdp", 4, "Sharded")]
    tensors = [("tensor_parallel", size, "Sharded") for size in (2, 4)]
    for strategy, size, name in [*stops, *tensors, ("pipeline", 2, "Pipeline")]:
        more = ["strategy.parallelize_plan=[{1:colwise},{4:rowwise}]"] if strategy == "tensor_parallel" else []
        more += [f"strategy.{'replicate' if strategy == 'fsdp' else 'shard'}=2"] if size == 4 else []
        assert in_world(size, stop_after_two_steps, composed(*cfg, f"strategy={strategy}", *more)) == [name] * size
        newest = list_snapshots(tmp_path / "moved" / "snapshots")[0]
        files = list(newest.glob("*.safetensors")) or list(newest.glob("state_*.pt"))  # whole layers of another rank
        writers = {"data_parallel": 0, "ddp": 0, "pipeline": 1}.get(strategy, 2)  # of replicas the first saves
        assert len(files) == (4 if (strategy, size) == ("tensor_parallel", 4) else writers)
    answers = in_world(2, train, composed(*cfg))
    saved = newest_snapshot(tmp_path / "moved")
    assert list(saved["optimizer"]) == list(saved["model"])
    assert answers == [pytest.approx(objective, rel=1e-9)] * 2
    assert distance(whole, weights(tmp_path / "moved")) < 1e-9


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_half_precision_and_sync_bn_stay_near_ddps_numbers(tmp_path: Path, strategy: str) -> None:
    few = [ON_TEST, "trainer.max_steps=3", "logger=[]", "model=mlp" if strategy == "pipeline" else "sync_bn=on"]
    runs = [["trainer.precision=bf16"], ["trainer.precision=fp32", "optimizer=adamw", "trainer.batch_size=61"]]
    if strategy == "fsdp":
        # fp32 for the large net: a processor without bf16 takes minutes for it.
        runs += [["trainer.precision=fp16"], ["model=resnet18", "trainer.precision=fp32", "trainer.max_steps=2"]]
    spread = trained(2, tmp_path / "spread", *[[*few, *run, f"strategy={strategy}"] for run in runs])
    plain = trained(2, tmp_path / "plain", *[[*few, *run] for run in runs])
    for (_, found), (_, expected) in zip(spread, plain, strict=True):
        assert distance(expected, found) < 0.05
