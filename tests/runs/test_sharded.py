"""strategy=fsdp and tensor_parallel: what a rank holds, computes and writes, and what reads such a snapshot."""

import copy
import gc
import shutil
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.config.check import instantiate
from lockstep.data.loader import LoadedPart
from lockstep.errors import ConfigError
from lockstep.models.gpt import gpt
from lockstep.snapshots import files
from lockstep.snapshots.files import list_snapshots
from lockstep.snapshots.initial_weights import load_initial_weights
from lockstep.strategies.base import local_part
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


def test_blocks_are_gathered_one_at_a_time_and_what_names_no_part_of_the_model_is_refused():
    for model, classes, least, names in (
        (NESTED, [], 30, ["first", "stages.0.0", "stages.1.a"]),  # containers are lists of blocks
        (TIED, ["Block"], 10**9, ["blocks.1", "blocks.0"]),
        (TIED, [], 1, ["positions", "blocks.0", "blocks.1", "norm"]),  # tied weights are the whole model's
    ):
        of = {module: name for name, module in model.named_modules()}
        assert [of[block] for block in blocks_to_wrap(model, classes, least)] == names
    with pytest.raises(ConfigError, match=r"names no class inside this model; type strategy.wrap_classes=\[\]"):
        blocks_to_wrap(TIED, ["Layer"], 0)
    with torch.device("meta"):
        model = gpt([8], 28, layers=1, heads=2, width=24, dropout=0.0, tied=True, variant="gpt2")
    with pytest.raises(ConfigError, match="embedding.tokens, whose weight is also .*model.tied=false"):
        styles_of_plan(model, [("embedding.tokens", "rowwise")])
    with pytest.raises(ConfigError, match=r"no module is named block1.mlp.wide; type model=gpt"):
        styles_of_plan(model, [("block1.mlp.wide", "colwise")])


@contextmanager
def set_up(strategy, model):
    """A strategy with `model`, in the world of this rank."""
    from lockstep.distributed.world import join_world
    from lockstep.strategies.gradient_sync import GradientSync

    with join_world("gloo", 60, None) as world:
        strategy.setup(model, Task().outputs, world, GradientSync())
        yield strategy
        world.barrier()  # who leaves while the other still connects ends it


def bytes_after_setup(cfg):
    """(bytes of all tensors that this rank still holds, bytes of the whole model) once train.py has set it up."""
    from lockstep import build
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


def live_bytes():
    """Bytes of the storages behind every tensor that Python can reach, each counted once."""
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and one.device.type == "cpu"]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_nothing_keeps_the_whole_model_after_setup(strategy):
    words = ["model=mlp", "model.width=200", "model.depth=5", "dataset=random"]
    words += ["trainer.precision=fp64", "dataset.samples=10", f"strategy={strategy}"]
    for held, whole in in_world(2, bytes_after_setup, composed(*words)):
        assert 0.3 * whole < held < 0.7 * whole


def whole_after_a_forward_pass():
    """How many parameters this rank holds whole then, where they are gathered again for the backward pass, and not."""
    found = []
    for again in (True, False):
        model = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 70))
        with set_up(Sharded(1, again, [], 1000), model) as strategy:
            strategy.module(torch.ones(4, 100))
            found.append(sum(not hasattr(parameter, "to_local") for parameter in strategy.module.parameters()))
    return found


def test_weights_that_are_kept_are_not_gathered_again_for_the_backward_pass():
    assert all(again < kept for again, kept in in_world(2, whole_after_a_forward_pass))


OPTIMIZERS = {name: [] for name in ("Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam")}
OPTIMIZERS |= {"ASGD": ["+optimizer.t0=2"], "RMSprop": ["optimizer.momentum=0.9", "+optimizer.centered=true"]}


def test_optimizers_of_torch_go_on_on_parts_as_on_whole_weights(tmp_path):
    # 7 samples a batch are 3, 2 and 2 on 3 ranks, of which two hold nothing of the last layer.
    small = ["dataset=random", "dataset.samples=21", "model=mlp", "model.width=7", "model.depth=1", "model.dropout=0"]
    small += ["trainer.batch_size=7", "trainer.epochs=3", "trainer.precision=fp64", "scheduler=constant", "logger=[]"]
    small += ["strategy=fsdp", "strategy.wrap_min_parameters=1", "optimizer.lr=0.05"]

    def trained(folder, ranks, steps):
        chosen = {name: [f"optimizer._target_=torch.optim.{name}", *more] for name, more in OPTIMIZERS.items()}
        last = f"trainer.max_steps={steps}"
        in_world(ranks, train_all, [composed(*small, *o, last, f"run_dir={folder / n}") for n, o in chosen.items()])

    alone, moved = tmp_path / "alone", tmp_path / "moved"
    trained(alone, 1, 3)
    shutil.copytree(alone, moved)
    trained(alone, 1, 7)
    trained(moved, 3, 7)
    assert max(distance(weights(alone / name), weights(moved / name)) for name in OPTIMIZERS) < 1e-12


class Recomputed(nn.Sequential):
    def __init__(self, reentrant):
        super().__init__(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ReLU(inplace=True))
        self.reentrant = reentrant

    def forward(self, inputs):
        return checkpoint(super().forward, inputs, use_reentrant=self.reentrant)


class UsedTwice(nn.Module):
    """One PReLU between two layers and behind them."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.relu = nn.Linear(4, 8), nn.Linear(8, 4), nn.PReLU()

    def forward(self, inputs):
        return self.relu(self.narrow(self.relu(self.wide(inputs))))


def of_cut_layers():
    """The distance of gradients from those of the plain model, and the masks of dropout between cut layers and behind
    them."""
    torch.manual_seed(0)
    cases = [(UsedTwice(), [{"wide": "colwise"}, {"narrow": "rowwise"}])]
    for reentrant in (False, True):
        block = nn.Sequential(nn.Linear(4, 4), Recomputed(reentrant), nn.Linear(4, 4))
        cases.append((block, [{"1.0": "colwise"}, {"1.2": "rowwise"}, {"2": "gathered"}]))
    apart, masks, one = [], [], torch.ones(()).double()
    inputs, targets = torch.randn(3, 4).double(), torch.rand(3, 4).double()
    for model, plan in cases:
        plain = copy.deepcopy(model.double())
        nn.functional.mse_loss(plain(inputs), targets).backward()
        with set_up(Sharded(1, True, [], 1000, plan), model) as strategy:
            part = LoadedPart(0, 0, inputs, targets, torch.arange(3))
            strategy.forward_backward(part, nn.functional.mse_loss, one, last=True)
            found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            assert any(local_part(parameter).numel() * 2 == parameter.numel() for parameter in model.parameters())
            apart += [float((g - p.grad).abs().max()) for g, p in zip(found, plain.parameters(), strict=True)]
    model = nn.Sequential(nn.Linear(2, 64), nn.Dropout(), nn.Linear(64, 32), nn.Dropout())
    for dropout in (model[1], model[3]):
        dropout.register_forward_hook(lambda module, inputs, outputs: masks.append((outputs == 0).tolist()))
    with set_up(Sharded(1, True, [], 1000, [{"0": "colwise"}, {"2": "rowwise"}]), model) as strategy:
        torch.manual_seed(1)
        part = LoadedPart(0, 0, torch.ones(1, 2), torch.ones(1), torch.arange(1))
        strategy.forward_backward(part, lambda outputs, targets: outputs.sum(), torch.ones(()), last=True)
    return max(apart), masks


def test_cut_layers_have_the_gradients_of_whole_ones_and_masks_of_their_own_between_them():
    """Also a checkpointed block with activations in place, and a weight used between cut layers and behind them."""
    (far, (inside, outside)), (far_too, (inside_too, outside_too)) = in_world(2, of_cut_layers)
    assert max(far, far_too) < 1e-12
    assert inside != inside_too
    assert outside == outside_too


# 360 training samples in batches of 64: 6 steps an epoch.
SAVED = ["model=mlp", "logger=[]", "evaluation.batch_size=360", "strategy=fsdp", ema(0.9)]
SAVED += ["trainer.precision=fp64", "optimizer=adamw", "trainer.epochs=3", FEW_ON_TEST]


def test_each_rank_writes_its_part_and_all_read_it(tmp_path):
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
    cfg = composed(f"run_dir={again}", *SAVED, f"resume={run}", "strategy=ddp")
    begun = instantiate(cfg.model).double()
    load_initial_weights(begun, str(paths[0]), [])
    for net in (lockstep.load(run).net, begun):
        assert all(torch.equal(value, model[name]) for name, value in net.state_dict().items())
    in_world(1, train, cfg)  # nothing is left to train
    assert same_bits(run, again)
    (snapshots / "step_00000001").touch()  # an older one that cannot be removed
    in_world(2, train, composed(f"run_dir={run}", *SAVED, "trainer.epochs=4", "snapshot.keep_last=1"))
    assert [path.name for path in list_snapshots(snapshots)][0] == "step_00000024"


def without_safetensors(cfg):
    files.find_spec = lambda name: None
    return refusal(cfg)


def test_without_safetensors_it_is_refused_before_the_first_step(tmp_path):
    for said in in_world(2, without_safetensors, composed(f"run_dir={tmp_path}", *SAVED)):
        assert said.endswith("holds a part of the weights needs safetensors; type pip install safetensors")
