"""Activation checkpointing (Chen et al. 2016): blocks that keep no values for the backward pass, and compute again."""

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.compat import versions
from lockstep.data.partition import random_states_kept
from lockstep.distributed.sync_batch_norm import SyncBatchNorm
from lockstep.errors import ConfigError
from lockstep.models.base import require_matches

# Attributes that a forward pass may change: what they hold, and those that every module has.
PLAIN = (Tensor, bool, int, float, complex, str, type(None), list, dict, set)
OF_TORCH = frozenset(vars(nn.Module()))


def checkpointed_blocks(model: nn.Module, patterns: Sequence[object]) -> dict[str, nn.Module]:
    """{name: the outermost modules that one of `patterns` names, by the rules of fnmatch}.

    Raises ConfigError for a pattern without a module, and for a module that is not called.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    texts = [str(pattern) for pattern in patterns]
    matched = [any(fnmatchcase(name, text) for name in modules) for text in texts]
    require_matches("trainer.checkpoint_activations", texts, matched, modules)
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():  # parents come before their children
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and any(fnmatchcase(name, text) for text in texts):
            if isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule):
                what = "torch.jit has made it" if isinstance(module, torch.jit.ScriptModule) else "it only holds blocks"
                advice = f'"{name}.*"' if any(module.children()) else "[]"
                raise ConfigError(
                    f"trainer.checkpoint_activations cannot compute {name} again, as {what}; "
                    f"type 'trainer.checkpoint_activations=[{advice}]'"
                )
            found[name] = module
    return found


def checkpoint_activations(model: nn.Module, patterns: Sequence[object]) -> None:
    """Let the blocks that `patterns` name compute their values again in the backward pass. Names of weights stay."""
    for block in checkpointed_blocks(model, patterns).values():
        _Checkpointed.take_over(block)


@cache
def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` with its name. A module around it would change the names of its weights."""
    return type(kind.__name__, (_Checkpointed, kind), {"__module__": kind.__module__})


class _Checkpointed(nn.Module):
    def take_over(self: nn.Module) -> None:
        """Make a module one of these."""
        self.__class__ = _checkpointing(type(self))  # type: ignore[arg-type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        frozen = {name: parameter for name, parameter in self.named_parameters() if not parameter.requires_grad}
        before = versions([*frozen.values()])
        outputs = checkpoint(
            super().forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _as_now(self)), **kwargs
        )
        changed = [
            name for name, old, new in zip(frozen, before, versions([*frozen.values()]), strict=True) if old != new
        ]
        if changed:
            raise ConfigError(
                f"the forward pass of a {type(self).__name__} changes its weight {changed[0]}, and would change it "
                f"twice if it computed again; leave this block out of trainer.checkpoint_activations, or keep what is "
                f"no trained weight in a buffer (register_buffer)"
            )
        return outputs


def _as_now(block: nn.Module) -> AbstractContextManager[None]:
    """A block in which `block` computes as it does now: torch takes care of its own random numbers alone.

    Its buffers and plain attributes are what they are now, and changes of them are dropped: running statistics and
    counts move once in a step.
    """
    then = {place: _kept(value) for place, value in _state(block).items()}
    norms = [norm for norm in block.modules() if isinstance(norm, SyncBatchNorm) and not norm.counts_inputs]
    numpy_state, state = np.random.get_state(), random.getstate()

    @contextmanager
    def again() -> Iterator[None]:
        now = _state(block)
        with random_states_kept(), ExitStack() as stack:
            np.random.set_state(numpy_state)
            random.setstate(state)
            for norm in norms:
                stack.enter_context(norm.without_samples())
            try:
                _set(then)
                yield
            finally:
                _set(now)

    return again()


def _kept(value: Any) -> Any:
    """What a forward pass cannot change in place. A tensor with a gradient, such as a computed weight, is itself."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    return copy(value)


def _state(block: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """{(a module in `block`, the name of a buffer or of a plain attribute): its value}."""
    found = dict[tuple[nn.Module, str], Any]()
    for module in block.modules():
        own = vars(module).items()
        found |= {(module, name): value for name, value in own if isinstance(value, PLAIN) and name not in OF_TORCH}
        found |= {(module, name): value for name, value in module.named_buffers(recurse=False)}
    return found


def _set(state: dict[tuple[nn.Module, str], Any]) -> None:
    for (module, name), value in state.items():
        if getattr(module, name) is not value:  # setting takes longer than looking
            setattr(module, name, value)
