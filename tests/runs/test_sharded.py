"""strategy=fsdp and tensor_parallel: what a rank holds, computes and writes, and what reads such a snapshot."""

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

import lockstep
from lockstep.config.check import instantiate
from lockstep.data.loader import LoadedPart
from lockstep.errors import ConfigError
from lockstep.models.gpt import gpt
from lockstep.models.tutorial import convnet
from lockstep.snapshots import files
from lockstep.snapshots.files import list_snapshots
from lockstep.snapshots.initial_weights import load_initial_weights
from lockstep.strategies.base import Strategy, local_part
from lockstep.strategies.sharded import Sharded, blocks_to_wrap, styles_of_plan
from lockstep.tasks.base import Task
from support.commands import ema
from support.configs import composed, parts_of
from support.digits import FEW_ON_TEST
from support.models import TinyGPT
from support.worlds import distance, in_world, refusal, same_bits, train, train_all, weights

TIED = TinyGPT(vocabulary=11, width=8, depth=2, length=6)
STAGES = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.ModuleDict({"a": nn.Linear(8, 8)})])
NESTED = nn.ModuleDict({"first": nn.Linear(8, 8), "stages": STAGES, "last": nn.Linear(8, 2)})


@pytest.mark.parametrize(
    ("model", "classes", "least", "names"),
    [
        (NESTED, [], 1, ["first", "stages.0.0", "stages.1.a", "last"]),  # containers are lists of blocks
        (NESTED, [], 30, ["first", "stages.0.0", "stages.1.a"]),
        (NESTED, [], 10_000, []),
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
        gc.collect()
        return live_bytes() - before - data, whole


def live_bytes() -> int:
    """Bytes of the storages behind every tensor that Python can reach, each counted once."""
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and one.device.type == "cpu"]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_nothing_keeps_the_whole_model_after_setup(strategy: str) -> None:
    words = ["model=mlp", "model.width=200", "model.depth=5", "dataset=random"]
    words += ["trainer.precision=fp64", "dataset.samples=10", f"strategy={strategy}"]
    for held, whole in in_world(2, bytes_after_setup, composed(*words)):
        assert 0.3 * whole < held < 0.7 * whole


def gathers(configs: list[Any]) -> list[int]:
    """Trainings in this rank -> how often torch gathered weights in each."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    for cfg in configs:
        with CommDebugMode() as communication:
            train(cfg)
        counts = {str(name): number for name, number in communication.get_comm_counts().items()}
        found.append(sum(number for name, number in counts.items() if "allgather_base" in name))
    return found


def test_weights_that_are_kept_are_not_gathered_again_for_the_backward_pass(tmp_path: Path) -> None:
    words = ["model=mlp", "trainer.max_steps=3", "logger=[]"]
    ways = [["strategy=ddp"], ["strategy=fsdp", "strategy.reshard_after_forward=false"], ["strategy=fsdp"]]
    configs = [composed(*words, *way, f"run_dir={tmp_path / str(number)}") for number, way in enumerate(ways)]
    ddp, kept, again = in_world(2, gathers, configs)[0]
    assert ddp == 0 < kept < again


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


# 360 training samples in batches of 64: 6 steps an epoch.
SAVED = ["model=mlp", "logger=[]", "evaluation.batch_size=360", "strategy=fsdp", ema(0.9)]
SAVED += ["trainer.precision=fp64", "optimizer=adamw", "trainer.epochs=3", FEW_ON_TEST]


def test_each_rank_writes_its_part_and_all_read_it(tmp_path: Path) -> None:
    run, again, snapshots = tmp_path / "run", tmp_path / "again", tmp_path / "run" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "step_00000012.tmp").touch()  # where a folder should be: this one cannot be written
    in_world(2, train, composed(f"run_dir={run}", *SAVED, "snapshot.keep_last=9"))
    assert "no snapshot step_00000012: " in (run / "train.log").read_text()
    assert [path.name for path in list_snapshots(snapshots)] == ["step_00000018", "step_00000006"]
    model = torch.load(run / "model.pt", weights_only=True)
    numbers = 4 * sum(value.numel() for value in model.values())  # weights, two moments and the average
    paths = [*list_snapshots(snapshots), *list_snapshots(snapshots, "best")]
    for path in paths:
        sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
        assert len(sizes) == 2
        assert max(sizes) < 0.6 * sum(sizes)
        assert 8 * numbers <= sum(sizes) < 8.2 * numbers
        assert (path / "state.pt").stat().st_size < 0.2 * sum(sizes)
    net = lockstep.load(run)
    assert all(torch.equal(value, model[name]) for name, value in net.net.state_dict().items())
    cfg = composed(f"run_dir={again}", *SAVED, f"resume={run}", "strategy=ddp")
    begun = instantiate(cfg.model).double()
    load_initial_weights(begun, str(paths[0]), [])
    assert all(torch.equal(value, model[name]) for name, value in begun.state_dict().items())
    in_world(1, train, cfg)  # nothing is left to train
    assert same_bits(run, again)
    (snapshots / "step_00000001").touch()  # an older one that cannot be removed
    in_world(2, train, composed(f"run_dir={run}", *SAVED, "trainer.epochs=4", "snapshot.keep_last=1"))
    assert [path.name for path in list_snapshots(snapshots)][0] == "step_00000024"


def without_safetensors(cfg: Any) -> str:
    files.find_spec = lambda name: None  # type: ignore[attr-defined]
    return refusal(cfg)


def test_without_safetensors_it_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for said in in_world(2, without_safetensors, composed(f"run_dir={tmp_path}", *SAVED)):
        assert said.endswith("holds a part of the weights needs safetensors; type pip install safetensors")
