"""launch=dry: a planned rank holds what the real one holds, and sends what the formulas say."""

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig

from lockstep.errors import TrainingDiverged
from support.configs import composed
from support.worlds import in_world

SMALL = ["dataset=random", "dataset.samples=61", "model=mlp", "model.width=96", "trainer.batch_size=16"]
SMALL += ["optimizer=adamw", "optimizer.fused=false", "trainer.max_steps=1", "logger=[]"]

FOUND = ("held", "sent", "received", "calls", "payload")


def planned(cfg: DictConfig, ranks: int, *numbers: int) -> list[Any]:
    """What each rank of `numbers` in a planned world of `ranks` found."""
    from lockstep import build_data
    from lockstep.launchers.dry import plan_rank

    data = build_data.datasets(cfg)
    plans = [plan_rank(cfg, data, number, ranks)[0] for number in numbers]
    return [SimpleNamespace(**{name: getattr(plan, name) for name in FOUND}) for plan in plans]


def in_plan(words: list[str], ranks: int, *numbers: int) -> list[Any]:
    return in_world(1, planned, composed(*SMALL, *words), ranks, *numbers)[0]


def held_by_a_real_rank(cfg: DictConfig) -> dict[str, int]:
    from lockstep import build
    from lockstep.config.targets import instantiate
    from lockstep.distributed.world import init_distributed
    from lockstep.launchers.dry import Plan

    with init_distributed("gloo", 60) as world:
        strategy = instantiate(cfg.strategy)
        cfg, loaders = build.model_and_data(cfg, world, strategy)
        plan = Plan(build.train_state(cfg, strategy, loaders.train))
        plan.take_step(loaders.train)
    return plan.held


def test_a_planned_rank_holds_what_the_real_one_holds() -> None:
    real = in_world(3, held_by_a_real_rank, composed(*SMALL, "strategy=fsdp"))
    assert [rank.held for rank in in_plan(["strategy=fsdp"], 3, 0, 1, 2)] == real


def refused(cfg: DictConfig, ranks: int) -> list[tuple[int, str]]:
    """The ranks whose plan is refused, and why."""
    found = []
    for number in range(ranks):
        try:
            planned(cfg, ranks, number)
        except TrainingDiverged as error:
            found.append((number, str(error)))
    return found


def test_only_a_rank_with_nan_is_refused() -> None:
    """One batch has the whole data, and a rank has one of its shares."""
    data = [f"dataset.{half}._target_=support.damage.FloatDigits" for half in ("train", "test")]
    data += ["+dataset.train.broken=[100]", "+dataset.test.broken=[]", "dataset.mean=null", "dataset.std=null"]
    cfg = composed(*data, "model=mlp", "trainer.batch_size=1437", "trainer.epochs=1", "logger=[]")
    ((number, sentence),) = in_world(1, refused, cfg, 3)[0]
    assert sentence.startswith(f"the loss or the gradient of rank {number} is not finite in its first step; type laun")


def test_ranks_of_ddp_send_what_a_ring_sends() -> None:
    (last,) = in_plan(["trainer.batch_size=1024"], 1024, 1023)
    whole = last.held["parameters"]
    assert last.sent == last.received == pytest.approx(2 * 1023 / 1024 * whole, rel=1e-12)
    assert set(last.calls) == {"all_reduce"}


def test_replicas_sum_their_parts_only() -> None:
    (first,) = in_plan(["strategy=fsdp", "strategy.replicas=4"], 16, 0)
    assert first.calls["all_reduce"] == first.calls["reduce_scatter"]
    assert first.payload["all_reduce"] == first.payload["reduce_scatter"] / 4 == first.held["gradients"]
    assert first.payload["all_gather"] == 2 * first.payload["reduce_scatter"]


WAYS = ["gradient_sync=ring", "gradient_sync=parameter_server", "gradient_sync=fp16", "gradient_sync=bf16"]


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_add_up_send_what_they_say(way: str) -> None:
    """A ring sends as much on each rank, and a parameter server's connection carries what all others send."""
    words = [way, "trainer.ema=0.9"]
    first, last = in_plan(words, 4, 0, 3)
    whole = first.held["parameters"]
    assert first.held["moving average"] == whole
    if way == "gradient_sync=parameter_server":
        assert (first.sent, first.received, last.sent, last.received) == (3 * whole, 3 * whole, whole, whole)
    else:
        ring = 2 * 3 / 4 * whole * (1 if way == "gradient_sync=ring" else 0.5)
        for nbytes in (first.sent, first.received, last.sent, last.received):  # parts of a ring differ by a value
            assert nbytes == pytest.approx(ring, rel=0.001)


def test_layers_that_are_cut_send_what_dtensor_sends() -> None:
    words = ["strategy=tensor_parallel", "strategy.plan=[{1:colwise},{4:rowwise}]"]
    (first,), (whole,) = in_plan(words, 2, 0), in_plan([], 2, 0)
    outputs = 16 * 96 * 4  # of the second layer; and on the way back the gradient of the first one's inputs
    assert first.payload["all_reduce"] >= outputs
    assert first.held["parameters"] < whole.held["parameters"]
