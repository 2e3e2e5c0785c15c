"""Batch norm over the whole global batch, on any backend, CPU included, with unequal and even empty shares.

torch.nn.SyncBatchNorm refuses CPU tensors; on GPUs the host waits for each of its layers three times a step, and a
share without samples ends it. `SyncBatchNorm` here sums through shared memory, or by the process group's all-reduce.
Method: Ioffe and Szegedy 2015, with moments summed over the ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import compat
from lockstep.distributed.shared_memory import SumInPlace, sum_of_vectors
from lockstep.distributed.world import World
from lockstep.errors import ConfigError

BatchNorm = compat.batch_norm_class()
"""What torch's batch norms are derived from."""


def validate_batch_norms(module: nn.Module, kind: type[Any] = BatchNorm) -> None:
    """Raise ConfigError for a batch norm that computes something else than torch's: its replacement would not."""
    for name, norm in module.named_modules():
        if not isinstance(norm, kind):
            continue
        forwards = (BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
        is_plain = type(norm).forward in forwards or is_activated(norm)
        if not is_plain or compat.has_forward_hooks(norm):
            what = "a forward hook" if is_plain else "a forward pass of its own"
            raise ConfigError(
                f"sync_bn puts torch's batch norm over all ranks in place of {name}, and {type(norm).__name__} has "
                f"{what}, which would be lost; type sync_bn=off"
            )


def is_activated(norm: nn.Module) -> bool:
    """Whether `norm` is timm's batch norm with an activation in it, which most of timm's convolutional nets have."""
    forward = type(norm).forward
    return (forward.__module__, forward.__qualname__) == ("timm.layers.norm_act", "BatchNormAct2d.forward")


def unsynced_batch_norms(module: nn.Module) -> list[str]:
    """The names of those that normalise each rank's share by itself."""
    synced = (SyncBatchNorm, nn.SyncBatchNorm)
    named = module.named_modules()
    return [name for name, norm in named if isinstance(norm, BatchNorm) and not isinstance(norm, synced)]


def convert_sync_batch_norm(module: nn.Module, world: World, kind: type[Any] = BatchNorm) -> nn.Module:
    """Replace every batch norm in `module` by one over all ranks. Parameters, buffers and their names stay.

    kind: of those that are replaced. Raises ConfigError as `validate_batch_norms` does.
    """
    validate_batch_norms(module, kind)
    channels = [norm.num_features for norm in module.modules() if isinstance(norm, kind)]
    if not channels:
        return module
    sum_in_place = sum_of_vectors(world, 2 * max(channels) + 1, torch.float64)
    synced: dict[nn.Module, SyncBatchNorm] = {}  # a layer with two names stays one layer
    for name, norm in list(module.named_modules(remove_duplicate=False)):
        if isinstance(norm, kind):
            if norm not in synced:
                synced[norm] = SyncBatchNorm(norm, sum_in_place)
            if not name:  # the whole model is one batch norm
                return synced[norm]
            module.set_submodule(name, synced[norm])
    return module


class SyncBatchNorm(BatchNorm):  # type: ignore[misc, valid-type]
    """Batch norm whose training statistics cover every rank's share of the batch."""

    def __init__(self, norm: Any, sum_in_place: SumInPlace) -> None:
        """Take over the parameters and buffers of `norm`, a plain batch norm: the same tensors.

        sum_in_place: over the ranks.
        """
        super().__init__(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
        self.affine, self.track_running_stats, self.training = norm.affine, norm.track_running_stats, norm.training
        self.sum_in_place = sum_in_place
        self.counts_inputs = True
        self.is_activated = is_activated(norm)
        if self.is_activated:
            self.drop, self.act = norm.drop, norm.act
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

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
        output = self._normalised(input)
        return self.act(self.drop(output)) if self.is_activated else output

    def _normalised(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            evaluated: Tensor = super().forward(input)
            return evaluated
        counted = input if self.counts_inputs else input[:0]
        mean, var, count = _world_moments(counted, self.sum_in_place)
        if self.training and counted.numel() <= counted.shape[1] and count <= 1:  # the device is waited for only then
            raise ValueError("Expected more than 1 value per channel when training, as one process does")
        if self.training and self.track_running_stats:
            self._track(mean, var, count)
        output: Tensor = _Normalise.apply(
            counted, mean, var, count, self.weight, self.bias, self.eps, self.sum_in_place
        )
        return output if self.counts_inputs else torch.cat([output, input])

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
def _world_moments(x: Tensor, sum_in_place: SumInPlace) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel (C,), and the number of values behind them, over all ranks, in float64.

    The variance of each share is taken about its own mean and then combined (Chan, Golub and LeVeque 1979), so no
    digits cancel if the mean is much larger than the spread. Two sums take a seventh of torch.var_mean's time here.
    """
    values = x.numel() / x.shape[1]
    if values:
        wide = x.float() if x.dtype.itemsize < 4 else x
        share_mean = wide.mean(_all_but_channels(x))
        centred = wide - _per_channel(share_mean, wide)
        var = centred.mul_(centred).mean(_all_but_channels(x)).double()
        mean = share_mean.double()
    else:
        mean = var = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    sums = torch.cat([mean * values, (var + mean.square()) * values, mean.new_full((1,), values)])
    sum_in_place(sums)
    count = sums[-1]
    mean, square = (sums[:-1] / count).chunk(2)
    return mean, (square - mean.square()).clamp(min=0), count


class _Normalise(torch.autograd.Function):
    """(x - mean) / std * weight + bias, by torch's own kernels, which take mean and variance as constants.

    The backward pass adds what follows from mean and variance depending on the samples of every rank. The gradients of
    weight and bias are this rank's own sums: gradient averaging adds them up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        sum_in_place: SumInPlace,
    ) -> Tensor:
        ctx.eps, ctx.sum_in_place = eps, sum_in_place
        dtype = torch.float32 if x.dtype.itemsize < 4 else x.dtype
        mean, var = mean.to(dtype), var.to(dtype)
        ctx.save_for_backward(x, mean, var, count, weight)
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps) if x.numel() else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, count, weight = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        wide_x, wide_grad = x.to(mean.dtype), grad.to(mean.dtype)
        if x.numel():
            unsaved = mean.new_empty(0)  # CUDA's kernels for channels_last refuse None
            grad_x, sum_grad_x, sum_grad = torch.ops.aten.native_batch_norm_backward(
                wide_grad, wide_x, scale, mean, var, unsaved, unsaved, False, ctx.eps, [True, True, True]
            )
        else:
            grad_x, sum_grad_x, sum_grad = wide_grad, torch.zeros_like(mean), torch.zeros_like(mean)
        sums = torch.cat([sum_grad, sum_grad_x]).double()
        ctx.sum_in_place(sums)
        mean_grad, mean_grad_x = (sums / count).to(mean.dtype).chunk(2)
        rstd = (var + ctx.eps).rsqrt()
        # grad_x -= scale * rstd * (mean_grad + (x - mean) * rstd * mean_grad_x), as a slope and an offset per channel.
        slope = scale * rstd.square() * mean_grad_x
        offset = scale * rstd * mean_grad - slope * mean
        grad_x.addcmul_(wide_x, _per_channel(slope, wide_x), value=-1).sub_(_per_channel(offset, wide_x))
        grads = (None, None) if weight is None else (sum_grad_x.to(weight), sum_grad.to(weight))
        return grad_x.to(x.dtype), None, None, None, *grads, None, None


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values: Tensor, reference: Tensor) -> Tensor:
    """(C,) in the type of `reference` (N, C, ...), shaped so that it broadcasts over it."""
    return values.to(reference.dtype).view(1, -1, *[1] * (reference.dim() - 2))
