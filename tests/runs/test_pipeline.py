"""strategy=pipeline: stages, small batches, and what each rank keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.check import instantiate
from lockstep.data.loader import LoadedPart
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.preflight import preflight
from support.commands import ema
from support.configs import composed, with_values
from support.worlds import distance, in_world, train, train_all, weights

SMALL = [
    "dataset=random",
    "dataset.samples=61",
    "model=mlp",
    "model.depth=3",
    "model.width=16",
    "trainer.precision=fp64",
]
SHORT = ["trainer.batch_size=16", "trainer.epochs=1", "evaluation.batch_size=20", "optimizer=adamw", "logger=[]"]


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


def test_schedules_and_micro_batches_have_one_ranks_numbers(tmp_path: Path) -> None:
    base = composed(*SMALL, *SHORT, "trainer.max_grad_norm=0.3", ema(0.8))
    in_world(1, train_all, [with_values(base, f"run_dir={tmp_path / 'alone'}")])
    piped = composed(*SMALL, *SHORT, "trainer.max_grad_norm=0.3", ema(0.8), "strategy=pipeline")
    runs = {
        "1F1B": [],
        "GPipe": ["strategy.schedule=GPipe"],
        "few": ["strategy.micro_batches=2"],
        "accumulated": ["trainer.gradient_accumulation_steps=2"],
    }
    configs = [with_values(piped, f"run_dir={tmp_path / name}", *more) for name, more in runs.items()]
    (ran, *others) = in_world(3, schedules_of, configs)
    assert others == [ran] * 2
    for name in runs:
        assert distance(weights(tmp_path / "alone"), weights(tmp_path / name)) < 1e-11, name
    one_each, gpipe, few, _ = ran
    assert max(one_each) == ("ScheduleGPipe", 1)  # for the rest of the last batch, of 13 samples
    assert one_each - {max(one_each)} == {("Schedule1F1B", 4), ("Schedule1F1B", 3)}
    assert gpipe == {("ScheduleGPipe", 4), ("ScheduleGPipe", 3), ("ScheduleGPipe", 1)}
    assert few == {("ScheduleGPipe", 2), ("ScheduleGPipe", 1)}  # 1F1B needs three micro-batches here


@pytest.mark.parametrize("frozen", ["0", "2"])
def test_a_stage_may_have_frozen_layers_only(tmp_path: Path, frozen: str) -> None:
    layers = [*SMALL[:2], SMALL[-1], *SHORT, "model=linear", "model._target_=support.models.scaled_layers"]
    layers += [f"parameters.freeze=['{frozen}']", "trainer.max_grad_norm=0.3", ema(0.8)]
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'alone'}", *layers)])
    in_world(2, train_all, [composed(f"run_dir={tmp_path / 'piped'}", *layers, "strategy=pipeline")])
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "piped")) < 1e-11


@pytest.mark.parametrize(("inputs", "targets"), [("dict", "tensor"), ("tensor", "dict")])
def test_a_batch_of_several_tensors_is_refused(inputs: str, targets: str) -> None:
    values: dict[str, Any] = {"tensor": torch.ones(4, 2), "dict": {"left": torch.ones(4, 2)}}
    strategy = instantiate(composed("strategy=pipeline").strategy)
    strategy.world = World(0, 2, torch.device("cpu"), None, 60, None)  # type: ignore[arg-type]
    part = LoadedPart(0, 0, values[inputs], values[targets], torch.arange(4))
    with pytest.raises(ConfigError, match="samples or targets here are several; type strategy=fsdp"):
        strategy.forward_backward(part, None, torch.ones(()), True)


def test_a_batch_smaller_than_the_number_of_ranks_is_legal(tmp_path: Path) -> None:
    tiny = [*SMALL, *SHORT, "dataset.samples=7", "trainer.batch_size=2"]
    cfg = composed(*tiny, "strategy=pipeline", f"run_dir={tmp_path / 'piped'}")
    launched = composed(
        *tiny, "strategy=pipeline", "launch=spawn", "launch.nproc_per_node=3", f"run_dir={tmp_path / 'x'}"
    )
    preflight(launched)
    in_world(3, train_all, [cfg])
    in_world(1, train_all, [composed(*tiny, f"run_dir={tmp_path / 'alone'}")])
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "piped")) < 1e-11


def test_a_sample_counts_once_however_many_stages_read_it(tmp_path: Path) -> None:
    words = [*SMALL[2:], "trainer.batch_size=301", "trainer.epochs=2", "optimizer.lr=0.05", "logger=[]"]
    words.append("task.class_weights=[1,2,0,4,5,6,0.7,8,9,10]")
    in_world(1, train_all, [composed(*words, f"run_dir={tmp_path / 'alone'}")])
    runs = {"piped": [], "parts": ["trainer.gradient_accumulation_steps=2"]}
    piped = [*words, "strategy=pipeline"]
    configs = [composed(*piped, *more, f"run_dir={tmp_path / name}") for name, more in runs.items()]
    in_world(3, train_all, configs)
    for name in runs:
        assert distance(weights(tmp_path / "alone"), weights(tmp_path / name)) < 1e-11, name


def test_images_that_grow_pass_between_stages_in_their_size(tmp_path: Path) -> None:
    words = ["model=linear", "model._target_=support.models.of_any_size", "trainer.precision=fp64", "logger=[]"]
    words += [
        "trainer.epochs=2",
        "trainer.batch_size=256",
        "loader.augment={_target_:lockstep.data.augment.ShiftFlip,sizes:[6,8]}",
    ]
    in_world(1, train_all, [composed(*words, f"run_dir={tmp_path / 'alone'}")])
    in_world(2, train_all, [composed(*words, "strategy=pipeline", f"run_dir={tmp_path / 'piped'}")])
    assert distance(weights(tmp_path / "alone"), weights(tmp_path / "piped")) < 1e-11


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
