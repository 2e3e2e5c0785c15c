"""Batch norm over all ranks equals batch norm over the whole batch."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.distributed.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm, validate_batch_norms
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.tasks.classification import Classification
from support.configs import composed
from support.worlds import distance, in_world, train_all, weights

SHARES = ([7], [4, 3], [5, 2, 0])


def net(momentum: float | None, affine: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum, affine=affine),
        nn.Flatten(),
        nn.Linear(48, 5),
        nn.BatchNorm1d(5, momentum=momentum, affine=affine),
    ).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """7 samples. Their mean is a hundred times their spread, where a careless variance loses its digits."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 2, 6, 6, dtype=torch.double, generator=generator) + 100, torch.arange(7).remainder(5)


def gradients_and_buffers(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    Classification({"loss": "min"}, "loss", 0.0, None, {}, None)(model(inputs), targets)[0].backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*gradients, *model.buffers()]


def on_a_share(shares: list[int], variants: list[tuple[float | None, bool]]) -> list[list[float]]:
    """Of each variant, this rank's gradients, summed over the ranks, and its buffers after one training step."""
    found = []
    with join_world("gloo", 60) as world:
        for variant in variants:
            model = convert_sync_batch_norm(net(*variant), world)
            assert sum(isinstance(module, SyncBatchNorm) for module in model.modules()) == 2
            mine = [tensor.split(shares)[world.rank] for tensor in batch()]
            values = gradients_and_buffers(model, mine[0], mine[1])
            gradients = len(list(model.parameters()))
            summed = [world.all_reduce_sum(value) for value in values[:gradients]]
            found.append(torch.cat([value.flatten() for value in [*summed, *values[gradients:]]]).tolist())
    return found


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_uneven_and_empty_shares_give_the_whole_batchs_statistics_and_gradients(shares: list[int]) -> None:
    variants: list[tuple[float | None, bool]] = [(0.1, True), (None, False)]
    answers = in_world(len(shares), on_a_share, shares, variants)
    for number, variant in enumerate(variants):
        whole = torch.cat([value.flatten() for value in gradients_and_buffers(net(*variant), *batch())])
        for of_rank in answers:
            found = torch.tensor(of_rank[number], dtype=torch.double)
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


def evaluate() -> bool:
    """Rank 0 evaluates alone, which would wait for ever if it were a collective."""
    plain = net(0.1, True)
    plain(batch()[0])
    expected = plain.eval()(batch()[0])
    with join_world("gloo", 60) as world:
        synced = convert_sync_batch_norm(plain, world)
        assert list(synced.state_dict()) == list(net(0.1, True).state_dict())
        equal = torch.equal(synced(batch()[0]), expected) if world.is_rank_zero else True
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


def converted_twice() -> list[bool]:
    with join_world("gloo", 60) as world:
        model = convert_sync_batch_norm(Twice(), world)
        norms = [model.norm, model.same, model.inner[0], model.again[0]]  # type: ignore[index]
        return [isinstance(norm, SyncBatchNorm) and norm is model.norm for norm in norms]


def test_a_batch_norm_with_two_names_stays_one_layer() -> None:
    assert in_world(1, converted_twice) == [[True] * 4]


class WithActivation(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_batch_norm_with_a_forward_pass_or_a_hook_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="in place of 0, and WithActivation has a forward pass .*type sync_bn=off"):
        validate_batch_norms(nn.Sequential(WithActivation(3)))
    hooked = nn.BatchNorm2d(3)
    hooked.register_forward_hook(lambda module, inputs, outputs: outputs.relu())
    with pytest.raises(ConfigError, match="BatchNorm2d has a forward hook"):
        validate_batch_norms(nn.Sequential(hooked))
    validate_batch_norms(nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3)))


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
