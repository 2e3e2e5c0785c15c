"""Batch norm over the whole global batch, on any backend, CPU included, with unequal and even empty shares.

torch.nn.SyncBatchNorm serves GPUs; it converts happily on a CPU and then refuses CPU tensors. `SyncBatchNorm` here
speaks through the process group's own all-reduce. Method: Ioffe and Szegedy 2015, with moments summed over ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def off(module, world):
    """Each rank normalises by its own share's statistics; the result then depends on the number of ranks."""
    return module


def on(module, world):
    """Replace every batch norm in `module` by one over all ranks. Parameters, buffers and their names stay."""
    if world.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if isinstance(module, _BatchNorm):
        return SyncBatchNorm.of(module)
    for name, child in module.named_children():
        setattr(module, name, on(child, world))
    return module


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose training statistics cover every rank's share of the batch."""

    @classmethod
    def of(cls, norm):
        """Take over an ordinary batch norm's parameters and buffers, the same tensors."""
        synced = cls(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
        synced.affine, synced.track_running_stats, synced.training = norm.affine, norm.track_running_stats, norm.training
        for name in ("weight", "bias"):
            synced.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            synced.register_buffer(name, getattr(norm, name))
        return synced

    def _check_input_dim(self, x):
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")

    def forward(self, x):
        self._check_input_dim(x)
        if not self.training and self.track_running_stats:
            return super().forward(x)
        mean, var, count = _world_moments(x)
        if self.training and self.track_running_stats:
            self._track(mean, var, count)
        return _Normalise.apply(x, mean, (var + self.eps).rsqrt(), count, self.weight, self.bias)

    @torch.no_grad()
    def _track(self, mean, var, count):
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        self.running_var.lerp_((var * (count / (count - 1).clamp(min=1))).to(self.running_var), momentum)


@torch.no_grad()
def _world_moments(x):
    """Mean and biased variance per channel (C,) and the number of values behind them, over all ranks, in float64.

    Each share's variance is taken about its own mean and then combined (Chan, Golub and LeVeque 1979), so nothing
    cancels where the mean is large beside the spread.
    """
    dims = [0, *range(2, x.dim())]
    count = x.numel() / x.shape[1]
    if count:
        var, mean = torch.var_mean(x.float() if x.dtype.itemsize < 4 else x, dims, correction=0)
        mean, var = mean.double(), var.double()
    else:
        mean = var = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    sums = torch.cat([mean * count, (var + mean.square()) * count, mean.new_full((1,), count)])
    dist.all_reduce(sums)
    mean, square, count = *sums[:-1].chunk(2), sums[-1]
    mean, square = mean / count, square / count
    return mean, (square - mean.square()).clamp(min=0), count


class _Normalise(torch.autograd.Function):
    """(x - mean) / std * weight + bias, whose backward knows that mean and std come from every rank's samples.

    The weight's and bias's gradients stay this rank's own sums: the gradient averaging adds them up.
    """

    @staticmethod
    def forward(ctx, x, mean, rstd, count, weight, bias):
        scale = rstd if weight is None else rstd * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        ctx.save_for_backward(x, mean, rstd, count, weight)
        return (x * _over(scale, x)).add_(_over(shift, x))

    @staticmethod
    def backward(ctx, grad):
        x, mean, rstd, count, weight = ctx.saved_tensors
        dims = [0, *range(2, x.dim())]
        wide = grad.float() if grad.dtype.itemsize < 4 else grad
        centred = (x.to(wide.dtype) - _over(mean, wide)) * _over(rstd, wide)
        sum_grad, sum_grad_x = wide.sum(dims), (wide * centred).sum(dims)
        both = torch.cat([sum_grad, sum_grad_x]).double()
        dist.all_reduce(both)
        mean_grad, mean_grad_x = (both / count).chunk(2)
        scale = rstd if weight is None else rstd * weight
        grad_x = (wide - _over(mean_grad, wide) - centred * _over(mean_grad_x, wide)) * _over(scale, wide)
        grads = (None, None) if weight is None else (sum_grad_x.to(weight), sum_grad.to(weight))
        return grad_x.to(x.dtype), None, None, None, *grads


def _over(channel_values, like):
    """(C,) in `like`'s type, shaped to spread over (N, C, ...)."""
    return channel_values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
