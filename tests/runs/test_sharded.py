"""strategy=fsdp and tensor_parallel: what a rank holds, and the numbers of one process."""

import copy
import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.data.loader import LoadedPart
from lockstep.errors import ConfigError
from lockstep.models.gpt import gpt
from lockstep.models.tutorial import convnet
from lockstep.strategies.base import Strategy, local_part
from lockstep.strategies.sharded import Sharded, blocks_to_wrap, styles_of_plan
from lockstep.tasks.base import Task
from support.commands import ema, own_data
from support.configs import composed, parts_of, with_values
from support.logged import read_rows
from support.models import WATCHED, TinyGPT
from support.run_folders import newest_snapshot
from support.small_text import small_gpt
from support.worlds import distance, in_world, train, train_all, weights


class Nested(nn.Module):
    """Layers inside of every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.stages = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.ModuleDict({"a": nn.Linear(8, 8)})])
        self.last = nn.Linear(8, 2)


TIED = TinyGPT(vocabulary=11, width=8, depth=2, length=6)


@pytest.mark.parametrize(
    ("model", "classes", "least", "names"),
    [
        (Nested(), [], 1, ["first", "stages.0.0", "stages.1.a", "last"]),  # containers are lists of blocks
        (Nested(), [], 30, ["first", "stages.0.0", "stages.1.a"]),
        (Nested(), [], 10_000, []),
        (convnet([1, 8, 8], 10), [], 1000, ["layer2.0", "fc"]),
        (TIED, ["Block"], 10**9, ["blocks.1", "blocks.0"]),
        (TIED, [], 1, ["positions", "blocks.0", "blocks.1", "norm"]),  # tied weights are the whole model's
        (TIED, ["Embedding"], 0, ["positions"]),
    ],
)
def test_blocks_are_gathered_one_at_a_time(model: nn.Module, classes: list[str], least: int, names: list[str]) -> None:
    of = {module: name for name, module in model.named_modules()}
    assert [of[block] for block in blocks_to_wrap(model, classes, least)] == names


def test_what_names_no_part_of_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names no class inside this model; type strategy.wrap_classes=\[\]"):
        blocks_to_wrap(TIED, ["Layer"], 0)
    with torch.device("meta"):
        model = gpt([8], 28, layers=1, heads=2, width=24, dropout=0.0, tied=True, variant="gpt2")
    with pytest.raises(ConfigError, match="embedding.tokens, whose weight is also .*model.tied=false"):
        styles_of_plan(model, [("embedding.tokens", "rowwise")])
    with pytest.raises(ConfigError, match=r"no module is named block1.mlp.wide; type model=gpt"):
        styles_of_plan(model, [("block1.mlp.wide", "colwise")])


@contextmanager
def set_up(strategy: Strategy, model: nn.Module) -> Iterator[Any]:
    """A strategy with `model`, in the world of this rank."""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync

    with join_world("gloo", 60, None) as world:
        strategy.setup(model, Task().outputs, world, GradientSync())
        yield strategy
        world.barrier()  # who leaves while the other still connects ends it


def shares_of_one_step(replicas: int) -> list[int]:
    """How many values of the weights, the gradients and the moments this rank holds after one step."""
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 7))
    with set_up(Sharded(replicas, True, [], 1000), model) as strategy:
        optimizer = torch.optim.AdamW(strategy.module.parameters())
        strategy.module(torch.ones(4, 100)).sum().backward()
        optimizer.step()
        held = list(strategy.module.parameters())
        lists: list[Any] = [held, [one.grad for one in held], [state["exp_avg"] for state in optimizer.state.values()]]
        return [sum(tensor.to_local().numel() for tensor in tensors) for tensors in lists]


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_ranks_share_out_weights_gradients_and_moments(ranks: int, replicas: int) -> None:
    for of_ranks in zip(*in_world(ranks, shares_of_one_step, replicas), strict=True):
        one_model = of_ranks[: ranks // replicas]
        assert of_ranks == one_model * replicas
        assert sum(one_model) == 101 * 50 + 51 * 7
        assert max(one_model) < 1.2 * sum(one_model) / len(one_model)


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
        read = [loader.reader.dataset for loader in (loaders.train, loaders.test)]
        data = sum(tensor.nbytes for dataset in read for tensor in (dataset.inputs, dataset.targets))
        whole = sum(parameter.numel() * 8 for parameter in instantiate(cfg.model).parameters())
        WATCHED.clear()
        gc.collect()
        return live_bytes() - before - data, whole


def live_bytes() -> int:
    """Bytes of the storages behind every tensor that Python can reach, each counted once."""
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and one.device.type == "cpu"]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_nothing_keeps_the_whole_model_after_setup(strategy: str) -> None:
    words = ["model=mlp", "model._target_=support.models.watched_layers", "model.width=200", "model.depth=4"]
    words += ["trainer.precision=fp64", "dataset=random", "dataset.samples=10", f"strategy={strategy}"]
    for held, whole in in_world(2, bytes_after_setup, composed(*words)):
        assert 0.3 * whole < held < 0.7 * whole


def objectives_and_gathers(configs: list[Any]) -> list[tuple[float | None, int]]:
    """Trainings in this rank -> for each the objective, and how often torch gathered weights."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    for cfg in configs:
        with CommDebugMode() as communication:
            objective = train(cfg)
        counts = {str(name): number for name, number in communication.get_comm_counts().items()}
        found.append((objective, sum(number for name, number in counts.items() if "allgather_base" in name)))
    return found


def test_tied_weights_and_odd_parameters_have_ddps_numbers(tmp_path: Path) -> None:
    tied = ["model=linear", "model._target_=support.models.TinyGPT", "+model.vocabulary=11", "+model.width=16"]
    tied += ["+model.depth=2", "+model.length=6", *own_data("support.models.tokens"), "dataset.classes=11"]
    tied += [
        f"+dataset.{half}={{samples:{count},vocabulary:11,length:6}}" for half, count in (("train", 64), ("test", 21))
    ]
    tied += ["trainer.batch_size=16", "trainer.epochs=1", "optimizer=adamw", "trainer.max_grad_norm=0.5"]
    tied += ["trainer.gradient_accumulation_steps=2", "loader.validation=16"]
    odd = ["dataset=random", "model=linear", "model._target_=support.models.OddParameters", "trainer.max_steps=3"]
    runs = {
        "tied": [*tied],
        "children": [*tied, "strategy=fsdp"],
        "blocks": [*tied, "strategy=fsdp", "strategy.wrap_classes=[Block]"],
        "kept": [*tied, "strategy=fsdp", "strategy.reshard_after_forward=false"],
        "odd": [*odd],
        "cut": [*odd, "strategy=fsdp", "strategy.wrap_min_parameters=1"],
    }
    same = ["trainer.precision=fp64", "optimizer.fused=false", "logger=[]"]
    configs = [composed(*run, *same, f"run_dir={tmp_path / name}") for name, run in runs.items()]
    (ddp, children, _, kept, *_), _ = in_world(2, objectives_and_gathers, configs)
    assert ddp[1] == 0 < kept[1] < children[1]  # weights that are kept are not gathered again for the backward pass
    for name, of in (("children", "tied"), ("blocks", "tied"), ("kept", "tied"), ("cut", "odd")):
        assert distance(weights(tmp_path / of), weights(tmp_path / name)) < 1e-9, name


OPTIMIZERS = {name: [] for name in ("Adadelta", "Adagrad", "Adamax", "AdamW", "NAdam", "RAdam")}
OPTIMIZERS |= {"ASGD": ["+optimizer.t0=2"], "RMSprop": ["optimizer.momentum=0.9", "+optimizer.centered=true"]}


def test_optimizers_of_torch_step_on_parts_as_on_whole_weights(tmp_path: Path) -> None:
    """Also over a resume at another number of ranks."""
    # 7 samples a batch are 3, 2 and 2 on 3 ranks, of which two hold nothing of the last layer.
    small = ["dataset=random", "dataset.samples=21", "model=mlp", "model.width=7", "model.depth=1", "model.dropout=0"]
    small += ["trainer.batch_size=7", "trainer.epochs=3", "trainer.precision=fp64", "scheduler=constant", "logger=[]"]
    small += ["strategy=fsdp", "strategy.wrap_min_parameters=1", "optimizer.lr=0.05"]

    def trained(folder: Path, ranks: int, steps: int) -> None:
        chosen = {name: [f"optimizer._target_=torch.optim.{name}", *more] for name, more in OPTIMIZERS.items()}
        last = f"trainer.max_steps={steps}"
        in_world(ranks, train_all, [composed(*small, *o, last, f"run_dir={folder / n}") for n, o in chosen.items()])

    alone, together, moved = (tmp_path / name for name in ("alone", "together", "moved"))
    trained(alone, 1, 3)
    shutil.copytree(alone, moved)
    for folder, ranks in ((alone, 1), (moved, 3), (together, 3)):
        trained(folder, ranks, 7)
    for name in OPTIMIZERS:
        for folder in (moved, together):
            assert distance(weights(alone / name), weights(folder / name)) < 1e-12, (folder, name)


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


def test_two_groups_of_two_ranks_have_one_processs_numbers(tmp_path: Path) -> None:
    options = [ema(0.8), "trainer.gradient_accumulation_steps=2", "trainer.max_steps=6", "logging.every=1"]
    base = small_gpt(tmp_path, *options, "logger=[csv]", "trainer.max_grad_norm=0.1", "optimizer.fused=false")
    in_world(1, train_all, [composed(*base, f"run_dir={tmp_path / 'alone'}")])
    alone, norms = newest_snapshot(tmp_path / "alone"), grad_norms(tmp_path / "alone")
    assert len(norms) == 6
    for way in ("replicate", "shard"):  # the two groups hold the same, or fsdp cuts what they hold
        cfg = composed(*base, "strategy=tensor_parallel", f"strategy.{way}=2")
        in_world(4, train_all, [with_values(cfg, f"run_dir={tmp_path / way}")])
        assert distance(weights(tmp_path / "alone"), weights(tmp_path / way)) < 1e-11
        assert grad_norms(tmp_path / way) == pytest.approx(norms, rel=1e-9)
        totals = newest_snapshot(tmp_path / way)["meter"]["totals"].tolist()
        assert totals == pytest.approx(alone["meter"]["totals"].tolist(), rel=1e-12)


def grad_norms(folder: Path) -> list[float]:
    return [value for _, tag, value in read_rows(folder) if tag == "train/grad_norm"]


class Recomputed(nn.Sequential):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ReLU(inplace=True))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=self.reentrant)
        return out


class UsedTwice(nn.Module):
    """One PReLU between two layers and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.relu = nn.Linear(4, 8), nn.Linear(8, 4), nn.PReLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.relu(self.narrow(self.relu(self.wide(inputs))))
        return out


CASES: dict[str, tuple[Any, list[Any]]] = {
    "used twice": (UsedTwice, [{"wide": "colwise"}, {"narrow": "rowwise"}]),
    **{
        f"checkpointed, reentrant={reentrant}": (
            partial(lambda one: nn.Sequential(nn.Linear(4, 4), one(), nn.Linear(4, 4)), partial(Recomputed, reentrant)),
            [{"1.0": "colwise"}, {"1.2": "rowwise"}, {"2": "gathered"}],
        )
        for reentrant in (False, True)
    },
}


def distance_of_gradients(case: str) -> float:
    """From those of the plain model."""
    torch.manual_seed(0)
    make, plan = CASES[case]
    model = make().double()
    plain, inputs, targets = copy.deepcopy(model), torch.randn(3, 4).double(), torch.rand(3, 4).double()
    nn.functional.mse_loss(plain(inputs), targets).backward()
    with set_up(Sharded(1, True, [], 1000, plan), model) as strategy:
        part = LoadedPart(0, 0, inputs, targets, torch.arange(3))
        strategy.forward_backward(part, nn.functional.mse_loss, torch.ones(()).double(), last=True)
        found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        assert any(local_part(one).numel() * 2 == one.numel() for one in model.parameters())
        pairs = zip(found, plain.parameters(), strict=True)
        return max(float((gradient - p.grad).abs().max()) for gradient, p in pairs)


@pytest.mark.parametrize("case", CASES)
def test_cut_layers_have_the_gradients_of_whole_ones(case: str) -> None:
    """Of a checkpointed block with activations in place, and of a weight used between cut layers and behind them."""
    assert max(in_world(2, distance_of_gradients, case)) < 1e-12


def masks() -> list[list[bool]]:
    """The masks of dropout between cut layers and behind them."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(2, 64), nn.Dropout(), nn.Linear(64, 32), nn.Dropout()), list[list[bool]]()
    for dropout in (model[1], model[3]):
        dropout.register_forward_hook(lambda module, inputs, outputs: kept.append((outputs == 0).tolist()))
    with set_up(Sharded(1, True, [], 1000, [{"0": "colwise"}, {"2": "rowwise"}]), model) as strategy:
        torch.manual_seed(1)
        part = LoadedPart(0, 0, torch.ones(1, 2), torch.ones(1), torch.arange(1))
        strategy.forward_backward(part, lambda outputs, targets: outputs.sum(), torch.ones(()), last=True)
    return kept


def test_ranks_draw_masks_of_their_own_between_cut_layers() -> None:
    (inside, outside), (inside_too, outside_too) = in_world(2, masks)
    assert inside != inside_too
    assert outside == outside_too
