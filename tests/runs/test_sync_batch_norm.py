"""Batch norm over all ranks equals batch norm over the whole batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.distributed.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.strategies.base import forward
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

SHARES = ([5], [4, 3], [0, 7], [5, 2, 0], [3, 0, 1, 9])
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
CASES += [("images", rows, mean) for rows in ("first", "views", "patches") for mean in (0, 2000)]


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


def batches(case: str, samples: int, deviations: float) -> list[tuple[Tensor, Tensor]]:
    """Of two steps: (samples, gradients of the outputs). deviations: the mean, where one is 1."""
    generator = torch.Generator().manual_seed(1)
    pair = [torch.randn(2, samples, *NORMS[case][1], dtype=torch.double, generator=generator) for _ in range(2)]
    return list(zip(pair[0] + deviations, pair[1], strict=True))


def of_one_process(case: str, rows: str, samples: int, deviations: float) -> dict[str, Tensor]:
    """What plain batch norm computes. The mean is taken off before, which rounds nothing; torch's own sums do."""
    model = made(case, rows)
    if isinstance(model.norm, nn.SyncBatchNorm):  # which refuses a CPU
        state, model.norm = model.norm.state_dict(), nn.BatchNorm1d(4).double()
        model.norm.load_state_dict(state)
    for inputs, slopes in batches(case, samples, deviations):
        centred = (inputs - deviations).requires_grad_()
        outputs = model(centred)
        (outputs * slopes).sum().backward()
        found = {"outputs": outputs.detach(), "gradient": centred.grad}
    found |= {name: parameter.grad for name, parameter in model.norm.named_parameters(prefix="norm")}
    found |= dict(model.named_buffers())
    if "norm.running_mean" in found:
        kept = 0 if model.norm.momentum is None else (1 - model.norm.momentum) ** 2
        found["norm.running_mean"] = found["norm.running_mean"] + deviations * (1 - kept)
    if rows == "first":
        found["outputs"][:, 1:] += deviations
    return found


def errors(shares: list[int]) -> dict[str, float]:
    """{case: the greatest relative distance of this rank's numbers from those of one process}."""
    found = dict[str, float]()
    with join_world("gloo", 60) as world:
        begin = sum(shares[: world.rank])
        own = slice(begin, begin + shares[world.rank])
        for case, rows, deviations in CASES:
            if deviations and world.size == 1:  # a rank alone uses torch's own, which loses digits
                continue
            expected = of_one_process(case, rows, sum(shares), deviations)
            model = made(case, rows)
            names = list(model.state_dict())
            convert_sync_batch_norm(model, world)
            assert isinstance(model.norm, SyncBatchNorm)
            assert list(model.state_dict()) == names
            for inputs, slopes in batches(case, sum(shares), deviations):
                mine = inputs[own].clone().requires_grad_()
                outputs = forward(model, mine)
                (outputs * slopes[own]).sum().backward()
            mine_grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
            here = {"outputs": outputs.detach(), "gradient": mine_grad, **dict(model.named_buffers())}
            grads = {name: parameter.grad for name, parameter in model.norm.named_parameters(prefix="norm")}
            here |= {name: world.all_reduce_sum(grad.clone()) for name, grad in grads.items()}
            expected |= {name: expected[name][own] for name in ("outputs", "gradient")}
            assert here.keys() == expected.keys()
            apart = [distance(value.double(), here[name]) for name, value in expected.items() if value.numel()]
            found[f"{case}, {rows}, {deviations}"] = max(apart)
        if world.is_rank_zero:  # an evaluation is no collective: rank 0 alone would wait for ever
            plain = made(case, rows)
            plain.load_state_dict(model.state_dict())
            assert torch.equal(model.eval()(inputs), plain.eval()(inputs))
        world.barrier()
    return found


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_outputs_gradients_and_statistics_are_those_of_one_process(shares: list[int]) -> None:
    for of_rank in in_world(len(shares), errors, shares):
        assert {case: error for case, error in of_rank.items() if not error <= 1e-12} == {}


def rounded(dtype: torch.dtype) -> list[float]:
    """The distances of outputs, gradients and statistics from those of float64, of both ranks together."""
    torch.manual_seed(0)
    inputs, slopes = (torch.randn(12, 4, 5, 5).to(dtype, memory_format=torch.channels_last) for _ in range(2))
    plain, found = nn.BatchNorm2d(4).double(), []
    with join_world("gloo", 60) as world:
        synced = nn.Sequential(nn.BatchNorm2d(4))
        convert_sync_batch_norm(synced, world)
        for model, x, slope in ((plain, inputs.double(), slopes.double()), (synced, inputs, slopes)):
            own = slice(0, 12) if model is plain else slice(4 * world.rank, 4 + 8 * world.rank)
            mine = x[own].clone().requires_grad_()
            outputs = model(mine)
            (outputs * slope[own]).sum().backward()
            gathered = [world.all_gather_samples(value.detach())[0] for value in (outputs, mine.grad)]
            found.append([value[:12].double() for value in gathered] + [*model.buffers()][:2])
    return [distance(one, other.double()) for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_other_types_are_as_near_as_they_round(dtype: torch.dtype, limit: float) -> None:
    for distances in in_world(2, rounded, dtype):
        assert max(distances) < limit


class WithActivation(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def converted() -> str:
    """A layer with two names stays one, and keeps its hooks; one with a forward pass of its own is refused."""
    norm = nn.BatchNorm1d(2)
    norm.register_forward_hook(lambda module, inputs, outputs: outputs + 1)
    model = nn.ModuleDict({"norm": norm, "inner": nn.Sequential(norm)})
    with join_world("gloo", 60) as world:
        convert_sync_batch_norm(model, world)
        assert isinstance(model["inner"][0], SyncBatchNorm)
        assert model["inner"][0] is model["norm"]
        assert abs(model["norm"](torch.randn(4, 2)).mean().item() - 1) < 1e-6
        with pytest.raises(ConfigError) as raised:
            convert_sync_batch_norm(nn.Sequential(WithActivation(3)), world)
    return str(raised.value)


def test_a_layer_is_taken_over_with_all_that_it_has_or_refused() -> None:
    (said,) = in_world(1, converted)
    assert "in place of 0, and WithActivation has a forward pass of its own, which would be lost; type sync" in said


def normed(kind: str) -> nn.Module:
    """kind: of torch's batch norms for images."""
    norm = getattr(nn, kind)(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def test_trainings_with_sync_bn_have_one_ranks_numbers_and_off_has_not(tmp_path: Path) -> None:
    """But for torch's own layer over all ranks, which works on CPUs whatever sync_bn says."""
    words = ["model=linear", f"model._target_={__name__}.normed", "~model.shape", "~model.classes", "logger=[]"]
    words += ["trainer.precision=fp64", "trainer.max_steps=3", "trainer.batch_size=61"]
    kinds = {"off": "BatchNorm2d", "on": "BatchNorm2d", "auto": "BatchNorm2d", "own": "SyncBatchNorm"}

    def jobs(names: list[str]) -> list[object]:
        typed = {name: [f"sync_bn={name}"] if name in ("on", "auto") else ["sync_bn=off"] for name in names}
        made = [(tmp_path / f"{name}{len(names)}", kinds[name], typed[name]) for name in names]
        return [composed(f"run_dir={folder}", *words, f"+model.kind={kind}", *more) for folder, kind, more in made]

    in_world(1, train_all, jobs(["off"]))
    in_world(2, train_all, jobs([*kinds]))
    alone = weights(tmp_path / "off1")
    off, *synced = (distance(alone, weights(tmp_path / f"{name}4")) for name in kinds)
    assert max(synced) < 1e-10
    assert off > 1e-6
