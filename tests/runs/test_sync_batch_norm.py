"""Batch norm over all ranks equals batch norm over the whole batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.distributed.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm
from lockstep.distributed.world import World, join_world
from lockstep.errors import ConfigError
from lockstep.strategies.base import forward
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

SHARES = ([5], [4, 3], [0, 7], [3, 0, 1, 9])
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # {case: (layer, shape of a sample with 3 rows)}
    "vectors": (lambda: nn.BatchNorm1d(4), (3, 4)),
    "sequences": (lambda: nn.BatchNorm1d(4, eps=0.1), (3, 4, 5)),
    "images": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    "volumes": (lambda: nn.BatchNorm3d(4, momentum=0.5), (3, 4, 2, 3, 2)),
    "no weights": (lambda: nn.BatchNorm2d(4, affine=False), (3, 4, 5, 5)),
    "mean of all batches": (lambda: nn.BatchNorm1d(4, momentum=None), (3, 4)),
    "no running statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (3, 4)),
    "torch's own over all ranks": (lambda: nn.SyncBatchNorm(4), (3, 4, 5)),
    "lazy": (lambda: shaped(nn.LazyBatchNorm2d()), (3, 4, 5, 5)),
    "timm's with an activation": (lambda: activated(), (3, 4, 5, 5)),
}
# What the layer sees of the 3 rows of a sample: the first; all first ones, then all second ones, as of views that are
# concatenated; those of a sample beside each other, as patches. And the mean, where one is a standard deviation.
CASES = [(norm, "first", 0) for norm in NORMS] + [("vectors", "first", 2000)]
CASES += [("images", rows, mean) for rows in ("views", "patches") for mean in (0, 2000)]


def shaped(lazy: nn.Module) -> nn.Module:
    lazy.eval()(torch.ones(2, 4, 5, 5))
    return lazy.train()


def activated() -> nn.Module:
    from timm.layers import BatchNormAct2d

    layer: nn.Module = BatchNormAct2d(4, act_layer=nn.GELU)
    return layer


class Net(nn.Module):
    def __init__(self, norm: nn.Module, rows: str) -> None:
        super().__init__()
        self.norm, self.rows = norm, rows
        self.before = nn.Parameter(torch.ones(()).double())  # of layers before: a rank without samples goes back, too

    def forward(self, samples: Tensor) -> Tensor:
        """samples: (N, 3, C, ...). Returns the same shape."""
        samples = samples * self.before
        if self.rows == "first":
            return torch.cat([self.norm(samples[:, 0]).unsqueeze(1), samples[:, 1:]], 1)
        rows = samples.transpose(0, 1) if self.rows == "views" else samples
        outputs: Tensor = self.norm(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        return outputs.transpose(0, 1) if self.rows == "views" else outputs


def made(case: str, rows: str) -> Net:
    torch.manual_seed(0)
    norm = NORMS[case][0]().double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 2)
    return Net(norm, rows)


def trained(model: Net, batches: list[Tensor], slopes: list[Tensor]) -> dict[str, Tensor]:
    """Two steps: outputs and gradient of the last one, gradients of the weights, statistics."""
    for samples, slope in zip(batches, slopes, strict=True):
        inputs = samples.clone().requires_grad_()
        outputs = forward(model, inputs)
        (outputs * slope).sum().backward()
    gradient = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad
    found = {name: parameter.grad for name, parameter in model.norm.named_parameters(prefix="norm")}
    return found | {"outputs": outputs.detach(), "gradient": gradient, **dict(model.named_buffers())}


def of_one_process(model: Net, batches: list[Tensor], slopes: list[Tensor], mean: float) -> dict[str, Tensor]:
    """What plain batch norm computes. The mean is taken off before, which rounds nothing; torch's own sums do."""
    if isinstance(model.norm, nn.SyncBatchNorm):  # which refuses a CPU
        state, model.norm = model.norm.state_dict(), nn.BatchNorm1d(4).double()
        model.norm.load_state_dict(state)
    found = trained(model, [inputs - mean for inputs in batches], slopes)
    if "norm.running_mean" in found:
        kept = 0 if model.norm.momentum is None else (1 - model.norm.momentum) ** 2
        found["norm.running_mean"] = found["norm.running_mean"] + mean * (1 - kept)
    if model.rows == "first":
        found["outputs"][:, 1:] += mean
    return found


def errors(shares: list[int]) -> dict[str, float]:
    """{case: the greatest relative distance of this rank's numbers from those of one process}."""
    found, generator = dict[str, float](), torch.Generator().manual_seed(1)
    with join_world("gloo", 60) as world:
        own = slice(sum(shares[: world.rank]), sum(shares[: world.rank + 1]))
        for case, rows, mean in CASES:
            if mean and world.size == 1:  # a rank alone uses torch's own, which loses digits
                continue
            shape = (4, sum(shares), *NORMS[case][1])
            *batches, first, second = torch.randn(shape, dtype=torch.double, generator=generator)
            batches = [samples + mean for samples in batches]
            expected, model = of_one_process(made(case, rows), batches, [first, second], mean), made(case, rows)
            names = list(model.state_dict())
            convert_sync_batch_norm(model, world)
            assert isinstance(model.norm, SyncBatchNorm)
            assert list(model.state_dict()) == names
            here = trained(model, [samples[own] for samples in batches], [first[own], second[own]])
            here |= {name: world.all_reduce_sum(here[name].clone()) for name, _ in model.norm.named_parameters("norm")}
            expected |= {name: expected[name][own] for name in ("outputs", "gradient")}
            assert here.keys() == expected.keys()
            apart = [distance(value.double(), here[name]) for name, value in expected.items() if value.numel()]
            found[f"{case}, {rows}, {mean}"] = max(apart)
        if world.is_rank_zero:  # an evaluation is no collective: rank 0 alone would wait for ever
            plain = made(case, rows)
            plain.load_state_dict(model.state_dict())
            assert torch.equal(model.eval()(batches[0]), plain.eval()(batches[0]))
        world.barrier()
    return found


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_outputs_gradients_and_statistics_are_those_of_one_process(shares: list[int]) -> None:
    for of_rank in in_world(len(shares), errors, shares):
        assert {case: error for case, error in of_rank.items() if not error <= 1e-12} == {}


def rounded(world: World, dtype: torch.dtype) -> float:
    """The greatest distance of outputs, gradients and statistics from those of float64, of both ranks together."""
    torch.manual_seed(0)
    inputs, slopes = (torch.randn(12, 4, 5, 5).to(dtype, memory_format=torch.channels_last) for _ in range(2))
    plain, found = nn.BatchNorm2d(4).double(), []
    synced = nn.Sequential(nn.BatchNorm2d(4))
    convert_sync_batch_norm(synced, world)
    for model, x, slope in ((plain, inputs.double(), slopes.double()), (synced, inputs, slopes)):
        own = slice(0, 12) if model is plain else slice(4 * world.rank, 4 + 8 * world.rank)
        mine = x[own].clone().requires_grad_()
        outputs = model(mine)
        (outputs * slope[own]).sum().backward()
        gathered = [world.all_gather_samples(value.detach())[0] for value in (outputs, mine.grad)]
        found.append([value[:12].double() for value in gathered] + [*model.buffers()][:2])
    return max(distance(one, other.double()) for one, other in zip(*found, strict=True))


class WithActivation(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def of_types_and_hooks() -> tuple[float, float, str]:
    """A layer with two names stays one, and keeps its hooks; one with a forward pass of its own is refused."""
    norm = nn.BatchNorm1d(2)
    norm.register_forward_hook(lambda module, inputs, outputs: outputs + 1)
    model = nn.ModuleDict({"norm": norm, "inner": nn.Sequential(norm)})
    with join_world("gloo", 60) as world:
        distances = rounded(world, torch.float32), rounded(world, torch.bfloat16)
        convert_sync_batch_norm(model, world)
        assert isinstance(model["inner"][0], SyncBatchNorm)
        assert model["inner"][0] is model["norm"]
        mean = model["norm"](torch.ones(4, 2) * world.rank).mean().item()
        assert abs(mean - 2 * world.rank) < 1e-3  # of 0 and 1, which are -1 and 1, and 1 by the hook
        with pytest.raises(ConfigError) as raised:
            convert_sync_batch_norm(nn.Sequential(WithActivation(3)), world)
        world.barrier()
    return *distances, str(raised.value)


def test_other_types_are_as_near_as_they_round_and_a_layer_is_taken_over_with_all_that_it_has_or_refused() -> None:
    for single, half, said in in_world(2, of_types_and_hooks):
        assert single < 1e-6
        assert half < 1e-2
        assert "in place of 0, and WithActivation has a forward pass of its own, which would be lost; type sync" in said


def normed(kind: str) -> nn.Module:
    """kind: of torch's batch norms for images."""
    norm = getattr(nn, kind)(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def test_trainings_with_sync_bn_have_one_ranks_numbers_and_off_has_not(tmp_path: Path) -> None:
    """But for torch's own layer over all ranks, which works on CPUs whatever sync_bn says."""
    words = ["model=linear", f"model._target_={__name__}.normed", "~model.shape", "~model.classes", "logger=[]"]
    words += ["trainer.precision=fp64", "trainer.max_steps=3", "trainer.batch_size=61"]
    rows = {"off": ("off", "BatchNorm2d"), "on": ("on", "BatchNorm2d"), "auto": ("auto", "BatchNorm2d")}
    rows |= {"own": ("off", "SyncBatchNorm")}

    def train(size: int, names: list[str]) -> list[Tensor]:
        folders = [tmp_path / f"{name}{size}" for name in names]
        typed = [[f"sync_bn={rows[name][0]}", f"+model.kind={rows[name][1]}"] for name in names]
        jobs = zip(folders, typed, strict=True)
        in_world(size, train_all, [composed(f"run_dir={folder}", *words, *more) for folder, more in jobs])
        return [weights(folder) for folder in folders]

    (alone,) = train(1, ["off"])
    off, *synced = (distance(alone, found) for found in train(2, [*rows]))
    assert max(synced) < 1e-10
    assert off > 1e-6
