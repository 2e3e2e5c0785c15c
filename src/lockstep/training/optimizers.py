"""The optimizer of a run: parameter groups by rule, and Muon beside another one."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.schema import Count, Fraction, NotNegative, Parameters, Positive
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.models.base import matching_parameters, require_matches, sparse_parameters
from lockstep.strategies.base import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration: they bring all singular values near 1

Rule = tuple[str, list[str], dict[str, Any]]
"""(the key that says it, patterns of parameters, their hyperparameters)."""


def rules_of(parameters: Parameters) -> list[Rule]:
    """What `parameters` says of hyperparameters of their own."""
    rules = list[Rule]()
    for group in parameters.groups:
        match, values = group["match"], {name: value for name, value in group.items() if name != "match"}
        rules.append(("parameters.groups", [*map(str, match if isinstance(match, list | tuple) else [match])], values))
    if parameters.no_decay:
        rules.append(("parameters.no_decay", [*map(str, parameters.no_decay)], {"weight_decay": 0.0}))
    return rules


def require_fit(optimizer: Optimizer, rules: Sequence[Rule]) -> None:
    """Raise ConfigError for a rule with a hyperparameter that the optimizer does not have: torch would keep it, and
    never read it."""
    for key, _, values in rules:
        for name in values.keys() - optimizer.defaults.keys():
            what = f"{key}: {type(optimizer).__name__} has no {name}, but {', '.join(optimizer.defaults)}"
            raise ConfigError(f"{what}; type {key}=[] or one of these")


def parameter_groups(model: nn.Module, world: World, rules: Sequence[Rule]) -> list[Any]:
    """What an optimizer takes: the trained parameters, in groups if there are rules, of which the last one wins. A
    collective: groups and their order are the same on all ranks, though a rank may hold only some layers, and none of a
    group. Raises ConfigError for a pattern that no rank has."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not rules:
        return list(trained.values()) or [{"params": []}]  # a rank of a pipeline may hold frozen layers only
    matched = [[matching_parameters(model, pattern) for pattern in patterns] for _, patterns, _ in rules]
    kinds = {name: [name in set().union(*found) for found in matched] for name in trained}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    flags = [[bool(some) for some in found] for found in matched]
    of_ranks, of_names, of_kinds = zip(*world.all_gather_json([flags, names, [*kinds.values()]]), strict=True)
    for (key, patterns, _), *found in zip(rules, *of_ranks, strict=True):
        require_matches(key, patterns, map(any, zip(*found, strict=True)), [*chain(*of_names)])
    groups = []
    for kind in sorted({tuple(kind) for kind in chain(*of_kinds)}):
        group: dict[str, Any] = {"params": [trained[name] for name in trained if tuple(kinds[name]) == kind]}
        for (_, _, values), applies in zip(rules, kind, strict=True):
            group |= values if applies else {}
        groups.append(group)
    return groups


def can_fuse(model: nn.Module) -> bool:
    """Whether torch's fused optimizers can step on all weights: no complex ones, no parts of weights on several ranks,
    no sparse gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return not sparse_parameters(model) and all(p.is_floating_point() and local_part(p) is p for p in trained)


def give_momentum(optimizer: Optimizer) -> None:
    """Begin the momentum of torch's SGD at zero, which is what its first step makes of it: torch's fused kernel fails
    where one weight has its first gradient later than another."""
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for weights of two and more dimensions, another optimizer for all other parameters.

    torch.optim.Muon takes matrices only; here a filter (out, in, height, width) is a matrix of `out` rows. A parameter
    group with use_muon=false is the other optimizer's as a whole: an embedding, or the last layer. The decay is
    decoupled, as AdamW's. The Newton-Schulz iteration computes in the weights' own type.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Positive,
        momentum: Fraction,
        weight_decay: NotNegative,
        steps: Count,
        normalised: bool,
        others: Callable[[Any], Optimizer],
    ) -> None:
        self.steps, self.normalised = steps, normalised
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "use_muon": True}
        groups, own, rest = list(params), list[Any](), list[Any]()
        for group in groups if groups and isinstance(groups[0], dict) else [{"params": groups}]:
            mine = [weight for weight in group["params"] if group.get("use_muon", True) and weight.dim() >= 2]
            known = {id(weight) for weight in mine}
            own.append(defaults | group | {"params": mine})
            rest.append(group | {"params": [weight for weight in group["params"] if id(weight) not in known]})
        self.others = others(rest)
        super().__init__([*own, *self.others.param_groups], self.others.defaults | defaults)
        self._share()

    def _share(self) -> None:
        """The other optimizer works on this one's groups and state."""
        self.others.param_groups = self.param_groups[len(self.param_groups) // 2 :]
        self.others.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # load_state_dict puts new groups and a new state in place
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups[: len(self.param_groups) // 2]:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_of(weight, weight.grad, group["lr"], group["momentum"], group["weight_decay"])
        self.others.step()

    def _step_of(self, weight: Tensor, gradient: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        velocity: Tensor = state["momentum_buffer"]
        velocity.mul_(momentum).add_(gradient)
        direction = gradient.add(velocity, alpha=momentum).flatten(1)  # Nesterov's
        if self.normalised:
            norm = weight.norm()  # of zeros, as a last layer may begin with them, nothing is scaled
            weight.mul_(torch.where(norm > 0, len(weight) ** 0.5 / norm, 1.0))
        weight.mul_(1 - lr * weight_decay)
        rows, columns = direction.shape
        scale = 1.0 if self.normalised else max(1.0, rows / columns) ** 0.5
        weight.sub_(orthogonalised(direction, self.steps).view(weight.shape), alpha=lr * scale)


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """A matrix with the same singular vectors, whose singular values are near 1."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix / (matrix.norm() + 1e-7)
    x = x.T if is_tall else x
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x
