"""Batch norm over the whole global batch, on any backend, CPU included, with unequal and even empty shares.

torch.nn.SyncBatchNorm is for GPUs: it converts a model on the CPU, too, and then refuses CPU tensors. `SyncBatchNorm`
here uses the process group's all-reduce. Method: Ioffe and Szegedy 2015, with moments summed over the ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.distributed.world import World


def keep_batch_norm(module: nn.Module, world: World) -> nn.Module:
    """Change nothing: each rank normalises by the statistics of its own share, so the number of ranks matters."""
    return module


def convert_sync_batch_norm(module: nn.Module, world: World) -> nn.Module:
    """Replace every batch norm in `module` by one over all ranks. Parameters, buffers and their names stay."""
    if world.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return converted
    if isinstance(module, _BatchNorm):
        return SyncBatchNorm.from_batch_norm(module)
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batch_norm(child, world))
    return module


def sync_batch_norm_where_needed(module: nn.Module, world: World) -> nn.Module:
    """Convert, except in a world of one: there a plain batch norm's statistics cover the whole batch already."""
    return module if world.size == 1 else convert_sync_batch_norm(module, world)


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose training statistics cover every rank's share of the batch."""

    @classmethod
    def from_batch_norm(cls, norm: _BatchNorm) -> "SyncBatchNorm":
        """Take over the parameters and buffers of a plain batch norm: the same tensors."""
        synced = cls(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
        synced.affine, synced.track_running_stats = norm.affine, norm.track_running_stats
        synced.training = norm.training
        for name in ("weight", "bias"):
            synced.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            synced.register_buffer(name, getattr(norm, name))
        return synced

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...). Returns the same shape. A collective in training, unlike in evaluation."""
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            return super().forward(input)
        mean, var, count = _world_moments(input)
        if self.training and self.track_running_stats:
            self._track(mean, var, count)
        output: Tensor = _Normalise.apply(input, mean, (var + self.eps).rsqrt(), count, self.weight, self.bias)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var), momentum)


@torch.no_grad()
def _world_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel (C,), and the number of values behind them, over all ranks, in float64.

    The variance of each share is taken about its own mean and then combined (Chan, Golub and LeVeque 1979), so no
    digits cancel if the mean is much larger than the spread.
    """
    values = x.numel() / x.shape[1]
    if values:
        wide = x.float() if x.dtype.itemsize < 4 else x
        var, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
        mean, var = mean.double(), var.double()
    else:
        mean = var = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    sums = torch.cat([mean * values, (var + mean.square()) * values, mean.new_full((1,), values)])
    dist.all_reduce(sums)
    count = sums[-1]
    mean, square = (sums[:-1] / count).chunk(2)
    return mean, (square - mean.square()).clamp(min=0), count


class _Normalise(torch.autograd.Function):
    """(x - mean) / std * weight + bias. Its backward pass takes into account that mean and std depend on every rank.

    The gradients of weight and bias are this rank's own sums: gradient averaging adds them up.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, count: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        scale = rstd if weight is None else rstd * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        ctx.save_for_backward(x, mean, rstd, count, weight)
        return (x * _per_channel(scale, x)).add_(_per_channel(shift, x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, count, weight = ctx.saved_tensors
        wide = grad.float() if grad.dtype.itemsize < 4 else grad
        centred = (x.to(wide.dtype) - _per_channel(mean, wide)) * _per_channel(rstd, wide)
        sum_grad = wide.sum(_all_but_channels(x))
        sum_grad_x = (wide * centred).sum(_all_but_channels(x))
        sums = torch.cat([sum_grad, sum_grad_x]).double()
        dist.all_reduce(sums)
        mean_grad, mean_grad_x = (sums / count).chunk(2)
        scale = rstd if weight is None else rstd * weight
        grad_x = wide - _per_channel(mean_grad, wide) - centred * _per_channel(mean_grad_x, wide)
        grad_x = (grad_x * _per_channel(scale, wide)).to(x.dtype)
        if weight is None:
            return grad_x, None, None, None, None, None
        return grad_x, None, None, None, sum_grad_x.to(weight), sum_grad.to(weight)


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values: Tensor, reference: Tensor) -> Tensor:
    """(C,) in the type of `reference` (N, C, ...), shaped so that it broadcasts over it."""
    return values.to(reference.dtype).view(1, -1, *[1] * (reference.dim() - 2))
