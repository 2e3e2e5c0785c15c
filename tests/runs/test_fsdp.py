"""strategy=fsdp: which blocks are gathered one at a time, what a rank holds, and DDP's numbers."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.models.tutorial import convnet
from lockstep.strategies.sharded import Sharded, blocks_to_wrap
from support.commands import own_data
from support.configs import composed, parts_of, with_values
from support.models import WATCHED, Block, TinyGPT
from support.worlds import distance, in_world, train, train_all, weights


class Nested(nn.Module):
    """Layers inside of every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.stages = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.ModuleDict({"a": nn.Linear(8, 8)})])
        self.last = nn.Linear(8, 2)


def test_containers_are_lists_of_blocks_not_blocks() -> None:
    model = Nested()
    stages: Any = model.stages
    expected = [model.first, stages[0][0], stages[1]["a"], model.last]
    assert blocks_to_wrap(model, [], 1) == expected
    assert blocks_to_wrap(model, [], 30) == expected[:3]
    assert blocks_to_wrap(model, [], 10_000) == []
    image_model = convnet([1, 8, 8], 10)
    names = {module: name for name, module in image_model.named_modules()}
    assert [names[block] for block in blocks_to_wrap(image_model, [], 1000)] == ["layer2.0", "fc"]


def test_blocks_can_be_named_by_their_class() -> None:
    model = TinyGPT(vocabulary=11, width=8, depth=3, length=6)
    assert set(blocks_to_wrap(model, ["Block"], 10**9)) == set(model.blocks)
    both = blocks_to_wrap(model, ["Block", "LayerNorm"], 0)
    assert len(both) == 3 + 7
    assert all(both.index(norm) < both.index(block) for block in model.blocks for norm in (block.norm1, block.norm2))
    with pytest.raises(ConfigError, match=r"names no class inside this model; type strategy.wrap_classes=\[\]"):
        blocks_to_wrap(model, ["Layer"], 0)


def test_tied_weights_are_left_to_the_whole_model() -> None:
    model = TinyGPT(vocabulary=11, width=8, depth=2, length=6)
    blocks = blocks_to_wrap(model, [], 1)
    assert model.embedding not in blocks
    assert model.head not in blocks
    assert blocks == [model.positions, *model.blocks, model.norm]
    assert blocks_to_wrap(model, ["Embedding", "Linear"], 0) == [
        module
        for module in reversed(list(model.modules()))
        if isinstance(module, nn.Linear) and module is not model.head
    ] + [model.positions]
    assert isinstance(model.blocks[0], Block)


def shares_of_one_step(replicas: int) -> list[int]:
    """How many values of the weights, the gradients and the moments this rank holds after one step."""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync
    from lockstep.tasks.base import Task

    with join_world("gloo", 60) as world:
        strategy = Sharded(replicas, True, [], 1000)
        strategy.setup(nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 7)), Task().outputs, world, GradientSync())
        optimizer = torch.optim.AdamW(strategy.module.parameters())
        strategy.module(torch.ones(4, 100)).sum().backward()
        optimizer.step()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        gradients = [parameter.grad for parameter in strategy.module.parameters()]
        lists: list[Any] = [list(strategy.module.parameters()), gradients, moments]
        return [sum(tensor.to_local().numel() for tensor in tensors) for tensors in lists]


def test_ranks_share_out_weights_gradients_and_moments() -> None:
    for of_ranks in zip(*in_world(3, shares_of_one_step, 1), strict=True):
        assert sum(of_ranks) == 101 * 50 + 51 * 7
        assert max(of_ranks) < 0.4 * sum(of_ranks)


def test_each_replica_holds_the_model_once() -> None:
    for of_ranks in zip(*in_world(4, shares_of_one_step, 2), strict=True):
        assert of_ranks[:2] == of_ranks[2:]
        assert sum(of_ranks[:2]) == 101 * 50 + 51 * 7
        assert max(of_ranks) < 0.6 * sum(of_ranks[:2])


def bytes_after_setup(cfg: Any) -> tuple[int, int]:
    """(bytes of all tensors that this rank still holds, bytes of the whole model) once train.py has set it up."""
    from lockstep import build
    from lockstep.config.check import instantiate
    from lockstep.distributed.world import join_world

    with join_world("gloo", 60) as world:
        gc.collect()
        before = live_bytes()
        parts = parts_of(cfg)  # its strategy holds the model
        loaders = build.build_run(cfg, world, parts).loaders
        both = loaders.train, loaders.test
        data = sum(
            tensor.nbytes for loader in both for tensor in (loader.reader.dataset.inputs, loader.reader.dataset.targets)
        )
        gc.collect()
        whole = sum(parameter.numel() * 8 for parameter in instantiate(cfg.model).parameters())
        WATCHED.clear()
        gc.collect()
        return live_bytes() - before - data, whole


def live_bytes() -> int:
    """Bytes of the storages behind every tensor that Python can reach, each counted once."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


WATCHED_MODEL = [
    "model=mlp", "model._target_=support.models.watched_layers", "model.width=200", "model.depth=4",
    "trainer.precision=fp64", "dataset=random", "dataset.samples=10",
]  # fmt: skip


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_nothing_keeps_the_whole_model_after_setup(strategy: str) -> None:
    for held, whole in in_world(2, bytes_after_setup, composed(*WATCHED_MODEL, f"strategy={strategy}")):
        assert 0.3 * whole < held < 0.7 * whole


GPT = [
    "model=linear", "model._target_=support.models.TinyGPT", "+model.vocabulary=11",
    "+model.width=16", "+model.depth=2", "+model.length=6",
    *own_data("support.models.tokens"), "+dataset.train={samples:64,vocabulary:11,length:6}",
    "+dataset.test={samples:21,vocabulary:11,length:6}", "dataset.classes=11", "trainer.precision=fp64",
    "trainer.batch_size=16", "trainer.epochs=1", "optimizer=adamw", "optimizer.fused=false",
    "trainer.max_grad_norm=0.5",    "trainer.gradient_accumulation_steps=2", "logger=[]",
    "loader.validation=16",
]  # fmt: skip


def objectives_and_gathers(configs: list[Any]) -> list[tuple[float, int]]:
    """Trainings in this rank -> for each the objective, and how often torch gathered weights."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    for cfg in configs:
        with CommDebugMode() as communication:
            objective = train(cfg)
        counts = {str(name): number for name, number in communication.get_comm_counts().items()}
        found.append((objective, sum(number for name, number in counts.items() if "allgather_base" in name)))
    return found


def test_a_small_gpt_with_tied_weights_has_ddps_numbers(tmp_path: Path) -> None:
    fsdp = composed(*GPT, "strategy=fsdp")
    runs = [
        composed(*GPT, f"run_dir={tmp_path / 'ddp'}"),
        with_values(fsdp, f"run_dir={tmp_path / 'children'}"),
        with_values(fsdp, f"run_dir={tmp_path / 'blocks'}", "strategy.wrap_classes=[Block]"),
        with_values(fsdp, f"run_dir={tmp_path / 'kept'}", "strategy.reshard_after_forward=false"),
    ]
    objectives = in_world(2, objectives_and_gathers, runs)
    assert objectives[0] == objectives[1]
    ddp, children, _, kept = [gathers for _, gathers in objectives[0]]
    assert ddp == 0 < kept < children  # weights that are kept are not gathered again for the backward pass
    for name in ("children", "blocks", "kept"):
        assert distance(weights(tmp_path / "ddp"), weights(tmp_path / name)) < 1e-9


class InOrderOfRanks(nn.Module):
    """The rank decides which of two layers of one shape comes first, as a router of experts may by its samples."""

    def __init__(self, shape: list[int], classes: int) -> None:
        super().__init__()
        self.pair = nn.ModuleList([nn.Linear(shape[0], shape[0]) for _ in range(2)])
        self.last = nn.Linear(shape[0], classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, second = self.pair if torch.distributed.get_rank() == 0 else reversed(self.pair)
        outputs: torch.Tensor = self.last(first(inputs) + second(inputs))
        return outputs


def refusal(cfg: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        train(cfg)
    return str(refused.value)


def test_ranks_that_call_blocks_in_another_order_are_refused_before_the_update(tmp_path: Path) -> None:
    words = ["dataset=random", "model=linear", f"model._target_={__name__}.InOrderOfRanks", "strategy=fsdp"]
    cfg = composed(*words, "strategy.wrap_min_parameters=1", "logger=[]", f"run_dir={tmp_path}")
    for sentence in in_world(2, refusal, cfg):
        assert "the same blocks in the same order on all ranks, in all steps; type strategy=ddp" in sentence


def test_lists_of_parameters_and_transposed_parameters_have_ddps_numbers(tmp_path: Path) -> None:
    odd = ["dataset=random", "model=linear", "model._target_=support.models.OddParameters", "trainer.precision=fp64"]
    odd += ["trainer.max_steps=3", "optimizer.fused=false", "logger=[]"]
    cut = composed(*odd, f"run_dir={tmp_path / 'cut'}", "strategy=fsdp", "strategy.wrap_min_parameters=1")
    in_world(2, train_all, [composed(*odd, f"run_dir={tmp_path / 'ddp'}"), cut])
    assert distance(weights(tmp_path / "ddp"), weights(tmp_path / "cut")) < 1e-11
