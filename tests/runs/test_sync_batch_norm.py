"""Batch norm over all ranks equals batch norm over the whole batch."""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.distributed.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.strategies.base import forward
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

SHARES = ([5], [4, 3], [0, 7], [5, 2, 0], [0, 1, 6], [3, 0, 1, 9])
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
ROWS = ("first", "views", "patches")
"""What the layer sees of the 3 rows of a sample: the first; all first ones, then all second ones, as of views that are
concatenated; those of a sample beside each other, as patches."""


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
        self.before = nn.Parameter(
            torch.ones(()).double()
        )  # as of layers before: a rank without samples goes back, too

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
        means = (0, 2000) if world.size > 1 else (0,)  # a rank alone uses torch's own, which loses digits
        for case, rows, deviations in product(NORMS, ROWS, means):
            expected = of_one_process(case, rows, sum(shares), deviations)
            model = made(case, rows)
            convert_sync_batch_norm(model, world)
            assert isinstance(model.norm, SyncBatchNorm)
            for inputs, slopes in batches(case, sum(shares), deviations):
                mine = inputs[own].clone().requires_grad_()
                outputs = forward(model, mine)
                (outputs * slopes[own]).sum().backward()
            mine_grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
            here = {"outputs": outputs.detach(), "gradient": mine_grad, **dict(model.named_buffers())}
            here |= {
                name: world.all_reduce_sum(p.grad.clone()) for name, p in model.norm.named_parameters(prefix="norm")
            }
            expected |= {name: expected[name][own] for name in ("outputs", "gradient")}
            assert here.keys() == expected.keys()
            apart = [distance(value.double(), here[name]) for name, value in expected.items() if value.numel()]
            found[f"{case}, {rows}, {deviations}"] = max(apart)
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


def evaluate() -> bool:
    """Rank 0 evaluates alone, which would wait for ever if it were a collective."""
    plain = made("images", "first")
    inputs = batches("images", 7, 0)[0][0]
    plain(inputs)
    synced = deepcopy(plain)
    expected = plain.eval()(inputs)
    with join_world("gloo", 60) as world:
        convert_sync_batch_norm(synced.eval(), world)
        assert list(synced.state_dict()) == list(plain.state_dict())
        equal = torch.equal(synced(inputs), expected) if world.is_rank_zero else True
        world.barrier()
        return equal


def test_an_evaluation_uses_the_running_statistics_and_is_no_collective() -> None:
    assert in_world(2, evaluate) == [True, True]


class Twice(nn.Module):
    """A batch norm under two names, one of them inside of a layer that has two names, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.inner = nn.Sequential(self.norm)
        self.again, self.same = self.inner, self.norm
        self.norm.register_forward_hook(lambda module, inputs, outputs: outputs + 1)


def converted_twice() -> list[bool]:
    with join_world("gloo", 60) as world:
        model: Any = Twice()
        convert_sync_batch_norm(model, world)
        norms = [model.norm, model.same, model.inner[0], model.again[0]]
        mean = model.norm(torch.randn(4, 2)).mean()
        world.barrier()
    return [isinstance(norm, SyncBatchNorm) and norm is model.norm for norm in norms] + [abs(mean.item() - 1) < 1e-6]


def test_a_batch_norm_with_two_names_stays_one_layer_and_keeps_its_hooks() -> None:
    assert in_world(1, converted_twice) == [[True] * 5]


class WithActivation(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def refusal() -> str:
    with join_world("gloo", 60) as world, pytest.raises(ConfigError) as raised:
        convert_sync_batch_norm(nn.Sequential(WithActivation(3)), world)
    return str(raised.value)


def test_a_batch_norm_with_a_forward_pass_of_its_own_is_refused() -> None:
    (said,) = in_world(1, refusal)
    assert "in place of 0, and WithActivation has a forward pass of its own, which would be lost; type sync" in said


CONVNET = ["model=convnet", "trainer.precision=fp64", "trainer.max_steps=3", "logger=[]", "trainer.batch_size=61"]


def test_sync_bn_on_and_auto_give_one_ranks_numbers_and_off_does_not(tmp_path: Path) -> None:
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'alone'}", *CONVNET)])
    modes = ["on", "auto", "off"]
    in_world(2, train_all, [composed(f"run_dir={tmp_path / mode}", *CONVNET, f"sync_bn={mode}") for mode in modes])
    alone = weights(tmp_path / "alone")
    on, auto, off = (distance(alone, weights(tmp_path / mode)) for mode in modes)
    assert max(on, auto) < 1e-10
    assert off > 1e-6


def normed(kind: str) -> nn.Module:
    """kind: of torch's batch norms for images."""
    norm = getattr(nn, kind)(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def test_torchs_own_sync_batch_norm_in_a_net_works_on_cpus(tmp_path: Path) -> None:
    words = ["model=linear", f"model._target_={__name__}.normed", "~model.shape", "~model.classes", *CONVNET[1:]]
    plain, synced = ([*words, f"+model.kind={kind}"] for kind in ("BatchNorm2d", "SyncBatchNorm"))
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'plain'}", *plain)])
    in_world(1, train_all, [composed(f"run_dir={tmp_path / 'one'}", *synced)])
    in_world(2, train_all, [composed(f"run_dir={tmp_path / 'two'}", *synced, "sync_bn=off")])
    assert max(distance(weights(tmp_path / "plain"), weights(tmp_path / name)) for name in ("one", "two")) < 1e-10
