"""What is set once, before the first step: determinism, the model's device and layout, precision."""

import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from lockstep.config.schema import Trainer
from lockstep.data.partition import random_states_kept
from lockstep.distributed.host import has_native_bf16
from lockstep.distributed.world import World
from lockstep.models.base import has_lazy_layers, require_matches
from lockstep.strategies.base import model_dtype

log = logging.getLogger(__name__)


def set_determinism(seed: int, deterministic: bool, tf32: bool | None = None) -> None:
    """Seed torch, and choose algorithms that give the same bits every time, or the fastest. tf32: as trainer.tf32."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = tf32 is True
    torch.backends.cudnn.allow_tf32 = tf32 is not False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic  # shapes change seldom, and each is searched for once


def cast(module: nn.Module, precision: str) -> None:
    """Give float32 parameters and buffers of `module` the type of `precision`, in place, and complex64 ones in fp64
    complex128. Other types stay, as they were chosen: `Module.to` would take the imaginary part of complex weights
    away. In bfloat16 running statistics would not move: a norm that has them stays as a whole, as torch wants it. A
    tensor whose elements share memory, as `expand` makes it, becomes an ordinary one: no value could be loaded into
    it."""
    types, kept = {torch.float32: model_dtype(precision)}, set[Tensor]()
    if precision == "fp64":
        types[torch.complex64] = torch.complex128
    if precision == "bf16-true":
        norms = [part for part in module.modules() if getattr(part, "running_mean", None) is not None]
        kept = {tensor for norm in norms for tensor in [*norm.parameters(False), *norm.buffers(False)]}
    for tensor in [*module.parameters(), *module.buffers()]:
        dtype = types.get(tensor.dtype, tensor.dtype)
        if dtype != tensor.dtype and tensor not in kept:
            tensor.data = tensor.data.to(dtype)
        if not is_lazy(tensor) and tensor.layout == torch.strided and 0 in tensor.stride() and tensor.numel() > 1:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def model_memory_format(model: nn.Module, channels_last: bool | str, device: torch.device) -> torch.memory_format:
    """The layout of images and convolution weights; "auto" is channels_last for models with convolutions. Never on CPUs
    with a 1x1 convolution of few channels with a stride: without AVX-512 its backward pass damages memory in that
    layout (torch 2.14.1's oneDNN)."""
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if channels_last == "auto":  # MPS has few kernels for it
        channels_last = bool(layers) and device.type != "mps"
    damages = device.type == "cpu" and any(
        layer.kernel_size == (1, 1) and max(layer.stride) > 1 and layer.in_channels < 8 and layer.groups == 1
        for layer in layers  # 0 channels if a first batch is still to give their number
    )
    return torch.channels_last if channels_last and not damages else torch.contiguous_format


def prepare_model(
    model: nn.Module, trainer: Trainer, world: World, device: torch.device, layout: torch.memory_format
) -> None:
    """Bring the model to `device`, in the layout and type that it computes in."""
    precision, compile = trainer.precision, trainer.compile
    if precision.startswith("bf16") and world.device.type == "cpu" and world.is_rank_zero and not has_native_bf16():
        what = "this CPU has no bfloat16: %s is up to 8 times slower than fp32; type trainer.precision=fp32"
        log.warning(what, precision)
    cast(model, precision)
    model.to(device)
    if layout == torch.channels_last and not has_lazy_layers(model):  # without shapes there is no layout yet
        model.to(memory_format=layout)
    if compile:
        model.compile(mode=None if compile is True else compile)


def checkpoint_activations(model: nn.Module, patterns: Sequence[object]) -> None:
    """Let the outermost modules that `patterns` name, by the rules of fnmatch, compute their values again in the
    backward pass, in place of keeping them (Chen et al. 2016). Raises ConfigError for a pattern that names none."""
    uncalled, texts = nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule, [str(pattern) for pattern in patterns]
    modules = {name: part for name, part in model.named_modules() if name and not isinstance(part, uncalled)}
    matched = [any(fnmatchcase(name, text) for name in modules) for text in texts]
    require_matches("trainer.checkpoint_activations", texts, matched, modules)
    found = list[str]()
    for name, module in modules.items():  # parents come before their children
        if any(fnmatchcase(name, text) for text in texts) and not any(name.startswith(f"{each}.") for each in found):
            found.append(name)
            module.__class__ = _checkpointing(type(module))  # type: ignore[arg-type]


@cache
def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` with its name. A module around it would change the names of its weights."""
    return type(kind.__name__, (_Checkpointed, kind), {"__module__": kind.__module__})


class _Checkpointed(nn.Module):
    """A second pass computes what the first one did: running statistics and counters in buffers move once in a step,
    and numpy and random draw the same again, as torch does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        places = [(module, name) for module in self.modules() for name, _ in module.named_buffers(recurse=False)]
        then = [getattr(*place).clone() for place in places]
        numpy_state, state = np.random.get_state(), random.getstate()

        @contextmanager
        def again() -> Iterator[None]:
            now = [getattr(*place) for place in places]
            with random_states_kept():
                np.random.set_state(numpy_state)
                random.setstate(state)
                for place, buffer in zip(places, then, strict=True):
                    setattr(*place, buffer)
                try:
                    yield
                finally:
                    for place, buffer in zip(places, now, strict=True):
                        setattr(*place, buffer)

        options: Any = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), again())}
        return checkpoint(super().forward, *args, **options, **kwargs)
