"""Parameter groups by rule: which hyperparameters differ for which parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.data.source import tensors_in
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, first_of
from lockstep.models.base import matching_parameters, require_matches, sparse_parameters
from lockstep.strategies.base import Strategy
from lockstep.training.weight_check import local_part


def can_fuse(model: nn.Module) -> bool:
    """Whether torch's fused optimizers can step on all weights of `model`: no complex ones, no parts of weights on
    several ranks, no sparse gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return not sparse_parameters(model) and all(p.is_floating_point() and local_part(p) is p for p in trained)


class ParameterRules:
    """The rules of `parameters.no_decay` and `parameters.groups`.

    no_decay: patterns of parameters without weight decay. groups: [{"match": pattern or patterns, "lr": 0.01, ...}];
    where several match a parameter, the last one wins. Patterns: see `lockstep.models.base`.
    """

    def __init__(self, no_decay: Sequence[object], groups: Sequence[Mapping[str, Any]]) -> None:
        self.rules: list[tuple[str, list[str], dict[str, Any]]] = []  # (key, patterns, hyperparameters)
        for group in groups:
            named = group["match"] if isinstance(group["match"], Sequence) else [group["match"]]
            patterns = [named] if isinstance(named, str) else [str(name) for name in named]
            values = {name: value for name, value in group.items() if name != "match"}
            self.rules.append(("parameters.groups", patterns, values))
        if no_decay:
            self.rules.append(("parameters.no_decay", [str(name) for name in no_decay], {"weight_decay": 0.0}))

    def optimizer(
        self, make: Callable[[list[Any]], torch.optim.Optimizer], strategy: Strategy
    ) -> torch.optim.Optimizer:
        """What `make` returns for `parameters`.

        Raises ConfigError, too, for a hyperparameter that the optimizer does not have.
        """
        optimizer = make(self.parameters(strategy.model, strategy.world))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"the function or class in optimizer._target_ gives an object of {type(optimizer).__name__}, and "
                "torch.optim.Optimizer is wanted; type optimizer=<an option in conf/optimizer>, or return one"
            )
        _require_saved_state(optimizer, strategy)
        step = inspect.signature(optimizer.step).parameters.values()
        needed = [p.name for p in step if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if needed:
            raise ConfigError(
                f"{type(optimizer).__name__}.step needs {needed[0]}, and a step here has computed the loss already; "
                f"type optimizer=adamw, or def step(self, {needed[0]}=None)"
            )
        for key, _, values in self.rules:
            for name in values:
                if name not in optimizer.defaults:  # torch would keep it, and never read it
                    known = ", ".join(optimizer.defaults)
                    raise ConfigError(
                        f"{key}: {type(optimizer).__name__} has no {name}, but {known}; type {key}=[] or one of these"
                    )
        return optimizer

    def parameters(self, model: nn.Module, world: World) -> list[Any]:
        """What an optimizer takes: the trained parameters, in groups if there are rules. A collective.

        The groups and their order are the same on all ranks, though a rank may hold only some layers: a group can be
        empty. Parameters that no rule names come first. Raises ConfigError for a pattern that no rank's model has.
        """
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self.rules:
            return list(trained.values()) or [{"params": []}]  # a rank of a pipeline may hold frozen layers only
        matched = self._matched(model, world)
        kinds = {name: [number for number, names in enumerate(matched) if name in names] for name in trained}
        everyones = [kind for kinds_there in world.all_gather_json(list(kinds.values())) for kind in kinds_there]
        groups = []
        for kind in sorted(set(map(tuple, everyones))):
            group: dict[str, Any] = {"params": [trained[name] for name in trained if kinds[name] == list(kind)]}
            for number in kind:
                group |= self.rules[number][2]
            groups.append(group)
        return groups

    def _matched(self, model: nn.Module, world: World) -> list[set[str]]:
        """The parameters of this rank that each rule names."""
        matched = []
        for key, patterns, _ in self.rules:
            found = [matching_parameters(model, pattern) for pattern in patterns]
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            everyones = world.all_gather_json([[bool(some) for some in found], names])
            has_match = [any(flags) for flags in zip(*(flags for flags, _ in everyones), strict=True)]
            require_matches(key, patterns, has_match, [name for _, names in everyones for name in names])
            matched.append(set().union(*found))
        return matched


def _require_saved_state(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Raise ConfigError for an optimizer whose state no snapshot would have, such as two in one."""
    name, given = type(optimizer).__name__, optimizer.state_dict()
    if not {"state", "param_groups"} <= given.keys():
        raise ConfigError(
            f"{name}.state_dict gives {first_of(list(given))}, and a snapshot needs state and param_groups, as "
            f"torch's give; keep what belongs to a parameter in self.state[parameter], or type optimizer=adamw"
        )
    beside = {key: value for key, value in given.items() if key not in ("state", "param_groups")}
    if any(True for _ in tensors_in(beside)) and strategy.shards_state and strategy.world.size > 1:
        raise ConfigError(
            f"{name} keeps {first_of(list(beside))} beside its state, and each rank holds a part of it; keep it in "
            f"self.state[parameter], or type strategy=ddp"
        )
    inner = [key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        apart = [key for key in inner if getattr(optimizer, key).state is not optimizer.state]
        if apart:
            raise ConfigError(
                f"{name} has optimizers of its own, and no snapshot has the state of {first_of(apart)}; write "
                f"self.{apart[0]}.state = self.state in __init__ and __setstate__, or type optimizer=adamw"
            )
