"""Batch norm over the whole global batch, on any backend, CPU included, with unequal and even empty shares.

torch.nn.SyncBatchNorm refuses CPU tensors; on GPUs it makes the host wait in each layer, and an empty share ends it.
Method: Ioffe and Szegedy 2015, with the ranks' moments combined as in Chan, Golub and LeVeque 1979.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.distributed.shared_memory import SharedMemorySum, SumInPlace
from lockstep.distributed.world import World
from lockstep.errors import ConfigError

BatchNorm: Any = nn.SyncBatchNorm.__base__
"""What torch's batch norms are derived from, and perhaps one of the user's."""
WITH_ACTIVATION = ("timm.layers.norm_act", "BatchNormAct2d.forward")  # of most convolutional nets in timm
NO_VALUES = 1e-30  # the count of an empty share: torch's kernel divides by that of the first one


def convert_sync_batch_norm(module: nn.Module, world: World, kind: type[Any] = BatchNorm) -> None:
    """Make each batch norm of a `kind` in `module` one over all ranks. All that it has stays: parameters, names, hooks.
    Raises ConfigError for one that computes something else than torch's does."""
    norms = {name: norm for name, norm in module.named_modules() if isinstance(norm, kind)}
    for name, norm in norms.items():
        forward = type(norm).forward
        norm.has_activation = (forward.__module__, forward.__qualname__) == WITH_ACTIVATION
        if not norm.has_activation and forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise ConfigError(
                f"sync_bn puts torch's batch norm over all ranks in place of {name}, and {type(norm).__name__} has a "
                f"forward pass of its own, which would be lost; type sync_bn=off"
            )
    sum_in_place: SumInPlace = world.all_reduce_sum
    if norms:
        longest = world.size * (2 * max(norm.num_features for norm in norms.values()) + 1)
        with suppress(ConfigError):  # on all ranks alike. For 65 values on 2 busy ranks it takes a tenth of the time
            sum_in_place = SharedMemorySum(world, longest, torch.float64)
    for norm in norms.values():
        norm.__class__ = SyncBatchNorm  # as torch does with lazy layers
        norm.rank, norm.size, norm.sum_in_place, norm.counts_inputs = world.rank, world.size, sum_in_place, True


class SyncBatchNorm(BatchNorm):  # type: ignore[misc]
    """Batch norm whose training statistics cover every rank's share of the batch. See `convert_sync_batch_norm`."""

    @contextmanager
    def without_samples(self) -> Iterator[None]:
        """Inside the block, inputs stand in for a share without samples: not counted, they come out unchanged."""
        self.counts_inputs = False
        try:
            yield
        finally:
            self.counts_inputs = True

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...). Returns the same shape. A collective in training, unlike in evaluation."""
        self._check_input_dim(input)
        if (self.size == 1 and self.counts_inputs) or (self.track_running_stats and not self.training):
            output: Tensor = super().forward(input)
        elif self.counts_inputs:
            output = _Normalise.apply(input, self.weight, self.bias, self)
        else:
            output = torch.cat([_Normalise.apply(input[:0], self.weight, self.bias, self), input])
        return self.act(self.drop(output)) if self.has_activation else output

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and 1 / std (C,) of all ranks' values, and each rank's number of values (ranks,). A collective. Moves
        the running statistics. x: this rank's values (N, C, ...)."""
        channels, values = x.shape[1], x.numel() // x.shape[1]
        own = torch.ones(2 * channels, dtype=_wide(x).dtype if x.is_cuda else torch.float64, device=x.device)
        if values and x.is_cuda:
            own = torch.cat(torch.batch_norm_stats(x, self.eps))
        elif values:
            normalised, mean, invstd = torch.native_batch_norm(_wide(x), None, None, None, None, True, 0.0, self.eps)
            rest = normalised.mean([0, *range(2, x.dim())]) / invstd  # what torch has rounded off of a large mean
            own = torch.cat([mean + rest.double(), invstd])
        rows = own.new_zeros(self.size, 2 * channels + 1)
        rows[self.rank] = torch.cat([own, own.new_full((1,), values or NO_VALUES)])
        self.sum_in_place(rows.view(-1))  # of one rank's number and zeros: nothing is rounded
        means, invstds, counts = rows.split([channels, channels, 1], dim=1)
        if self.training and values <= 1 and counts.sum() <= 1:  # the device is waited for only then
            raise ValueError("Expected more than 1 value per channel when training, as one process does")
        running, momentum, counts = (None, None), 0.0, counts.flatten()
        if self.training and self.track_running_stats:
            self.num_batches_tracked += 1
            running = self.running_mean, self.running_var
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        combine = torch.batch_norm_gather_stats_with_counts if x.is_cuda else _combined
        typed = counts if running[0] is None else counts.to(running[0])  # as the kernel takes them
        return *combine(x, means, invstds, *running, momentum, self.eps, typed), counts.int()


def _combined(_: Tensor, means: Tensor, invstds: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """What torch's kernel of the long name computes, which is for GPUs alone."""
    running_mean, running_var, momentum, eps, counts = rest
    count, shares = counts.sum().double(), counts.unsqueeze(1) / counts.sum().double()
    mean = (means * shares).sum(0)
    mean += ((means - mean) * shares).sum(0)  # as above
    var = ((invstds**-2 - eps + (means - mean).square()) * shares).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean), momentum)
        running_var.lerp_((var * (count / (count - 1).clamp(min=1))).to(running_var), momentum)
    return mean, (var + eps).rsqrt()


class _Normalise(torch.autograd.Function):
    """(x - mean) / std * weight + bias, where mean and std depend on the samples of every rank. The gradients of weight
    and bias are this rank's own sums: gradient averaging adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: SyncBatchNorm) -> Tensor:
        x, ctx.sum_in_place = _dense(x), norm.sum_in_place
        mean, invstd, counts = norm.moments(x)
        ctx.save_for_backward(x, weight, mean, invstd, counts)
        if not x.numel():
            return torch.empty_like(x)
        if x.is_cuda:
            return torch.batch_norm_elemt(x, weight, bias, mean, invstd, norm.eps)
        return _normalised(x, mean, invstd, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        grad, wide_weight, is_fused = _dense(grad), None if weight is None else weight.to(mean), x.is_cuda
        sum_grad = sum_product = grad_weight = grad_bias = torch.zeros_like(mean)
        if x.numel() and is_fused:
            found = torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, True, True, True)
            sum_grad, sum_product, grad_weight, grad_bias = found
        elif x.numel():
            x, wide_grad = _wide(x), _wide(grad)
            moments = mean.to(x), invstd.to(x) ** -2, None, None
            _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                wide_grad, x, None, *moments, False, 0.0, [False, True, True]
            )
            sum_grad, sum_product = grad_bias.double(), grad_weight / invstd
        sums = torch.cat([sum_grad, sum_product])
        ctx.sum_in_place(sums)
        if x.numel() and is_fused:
            of_all = *sums.chunk(2), counts
            grad = torch.batch_norm_backward_elemt(grad, x, mean, invstd, wide_weight, *of_all)
        elif x.numel():
            scale = invstd if wide_weight is None else invstd * wide_weight
            offset, slope = sums.view(2, -1) * scale / counts.sum()
            grad_x = _normalised(x, mean, invstd, -slope * invstd, -offset)
            grad = grad_x.addcmul_(wide_grad, scale.to(x).view(1, -1, *[1] * (x.dim() - 2))).to(grad)
        grads = (None, None) if weight is None else (grad_weight.to(weight), grad_bias.to(weight))
        return grad, *grads, None


def _normalised(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """torch.batch_norm_elemt on the CPU."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (value if value is None else value.to(dtype) for value in (weight, bias))
    return F.batch_norm(x, mean.to(dtype), invstd.to(dtype) ** -2, weight, bias, eps=0.0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _dense(x: Tensor) -> Tensor:
    """In a layout that torch's kernels for GPUs take."""
    last = (torch.channels_last, torch.channels_last_3d)
    return x if any(x.is_contiguous(memory_format=layout) for layout in last) else x.contiguous()
