"""strategy=pipeline: one rank's numbers with any schedule, in small batches, of frozen stages and of growing images."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.check import instantiate
from lockstep.data.loader import LoadedPart
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from support.commands import ema
from support.configs import composed
from support.worlds import distance, in_world, train, train_all, weights

MLP = ["model=mlp", "model.depth=3", "model.width=16", "trainer.precision=fp64", "logger=[]"]
SHORT = ["dataset=random", "dataset.samples=61", "trainer.batch_size=16", "trainer.epochs=1", "optimizer=adamw"]
SHORT += ["evaluation.batch_size=20"]
CLIPPED = ["trainer.max_grad_norm=0.3", ema(0.8)]
SCALED = ["model=linear", "model._target_=support.models.scaled_layers", "trainer.precision=fp64", "logger=[]"]
GROWING = ["model=linear", "model._target_=support.models.of_any_size", "trainer.precision=fp64", "logger=[]"]
GROWING += ["trainer.epochs=2", "trainer.batch_size=256"]
GROWING += ["loader.augment={_target_:lockstep.data.augment.ShiftFlip,sizes:[6,8]}"]
WEIGHTED = [*MLP, "trainer.batch_size=301", "trainer.epochs=2", "task.class_weights=[1,2,0,4,5,6,0.7,8,9,10]"]
MICRO = "trainer.gradient_accumulation_steps=2"
ONE_EACH = {("ScheduleGPipe", 1)}  # for the rest of the last batch, of 13 samples
# {case: (ranks, what is trained, {how in stages: the schedules and their micro-batches, where they matter})}
CASES: dict[str, tuple[int, list[str], dict[tuple[str, ...], set[tuple[str, int]] | None]]] = {
    "schedules": (
        3,
        [*MLP, *SHORT, *CLIPPED],
        {
            (): {("Schedule1F1B", 4), ("Schedule1F1B", 3)} | ONE_EACH,
            ("strategy.schedule=GPipe",): {("ScheduleGPipe", 4), ("ScheduleGPipe", 3)} | ONE_EACH,
            ("strategy.micro_batches=2",): {("ScheduleGPipe", 2)} | ONE_EACH,  # 1F1B needs three micro-batches here
            (MICRO,): None,
        },
    ),
    "frozen first stage": (2, [*SCALED, *SHORT, *CLIPPED, "parameters.freeze=['0']"], {(): None}),
    "frozen last stage": (2, [*SCALED, *SHORT, *CLIPPED, "parameters.freeze=['2']"], {(): None}),
    "fewer samples than ranks": (
        3,
        [*MLP, *SHORT, "dataset.samples=7", "trainer.batch_size=2"],
        {(): None},
    ),
    "a sample counts once": (3, WEIGHTED, {(): None, (MICRO,): None}),
    "images that grow": (2, GROWING, {(): None}),
}


def schedules_of(configs: list[Any]) -> list[set[tuple[str, int]]]:
    """Trainings in this rank -> for each the schedules of its steps, and the micro-batches that they ran."""
    from lockstep.strategies.pipeline import Pipeline

    choose, found = Pipeline._schedule, []

    def noted(strategy: Pipeline, count: int, inputs: torch.Tensor, with_backward: bool) -> Any:
        schedule = choose(strategy, count, inputs, with_backward)
        if with_backward:
            found[-1].add((type(schedule).__name__, count))
        return schedule

    Pipeline._schedule = noted  # type: ignore[method-assign]
    for cfg in configs:
        found.append(set())
        train(cfg)
    return found


@pytest.mark.parametrize("case", CASES)
def test_stages_have_one_ranks_numbers(tmp_path: Path, case: str) -> None:
    ranks, words, ways = CASES[case]
    in_world(1, train_all, [composed(*words, f"run_dir={tmp_path / 'alone'}")])
    piped = [[*words, "strategy=pipeline", *way, f"run_dir={tmp_path / str(n)}"] for n, way in enumerate(ways)]
    ran, *others = in_world(ranks, schedules_of, [composed(*one) for one in piped])
    assert others == [ran] * (ranks - 1)
    for number, (found, expected) in enumerate(zip(ran, ways.values(), strict=True)):
        assert distance(weights(tmp_path / "alone"), weights(tmp_path / str(number))) < 1e-11, number
        assert expected is None or found == expected


@pytest.mark.parametrize(("inputs", "targets"), [("dict", "tensor"), ("tensor", "dict")])
def test_a_batch_of_several_tensors_is_refused(inputs: str, targets: str) -> None:
    values: dict[str, Any] = {"tensor": torch.ones(4, 2), "dict": {"left": torch.ones(4, 2)}}
    strategy = instantiate(composed("strategy=pipeline").strategy)
    strategy.world = World(0, 2, torch.device("cpu"), None, 60, None)  # type: ignore[arg-type]
    part = LoadedPart(0, 0, values[inputs], values[targets], torch.arange(4))
    with pytest.raises(ConfigError, match="samples or targets here are several; type strategy=fsdp"):
        strategy.forward_backward(part, None, torch.ones(()), True)
    numbers = [part.number for part in strategy.parts(0, 8, 2)]
    strategy.world = World(1, 2, torch.device("cpu"), None, 60, None)  # type: ignore[arg-type]
    assert set(numbers).isdisjoint(part.number for part in strategy.parts(0, 8, 2))  # each stage draws its own masks


def refusal(cfg: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        train(cfg)
    return str(refused.value)


@pytest.mark.parametrize(("model", "said"), [("resnet18", "type model=convnet"), ("linear", "type model=mlp")])
def test_a_model_that_cannot_be_cut_into_stages_is_refused_by_all_ranks(tmp_path: Path, model: str, said: str) -> None:
    cfg = composed("strategy=pipeline", f"model={model}", "logger=[]", f"run_dir={tmp_path}")
    sentences = in_world(2, refusal, cfg)
    assert len(set(sentences)) == 1
    assert said in sentences[0]
