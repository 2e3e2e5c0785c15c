"""The optimizer of a run: parameter groups by rule, and Muon beside another one."""

from collections.abc import Callable, Iterable
from itertools import chain, compress
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


def build_optimizer(
    make: Callable[[Any], Optimizer], parameters: Parameters, model: nn.Module, world: World, trains: bool
) -> Optimizer:
    """What `make` gives for the trained parameters, in groups as `parameters` says; of rules the last one wins. A
    collective: groups and their order are the same on all ranks, though a rank may hold only some layers, and none of a
    group. Raises ConfigError for a pattern that no rank has, and for a hyperparameter that the optimizer has not: torch
    would keep it, and never read it."""
    rules = list[tuple[str, list[str], dict[str, Any]]]()  # (the key, patterns of parameters, their hyperparameters)
    for group in parameters.groups:
        match, values = group["match"], {name: value for name, value in group.items() if name != "match"}
        rules.append(("parameters.groups", [*map(str, match if isinstance(match, list | tuple) else [match])], values))
    if parameters.no_decay:
        rules.append(("parameters.no_decay", [*map(str, parameters.no_decay)], {"weight_decay": 0.0}))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups: list[Any] = list(trained.values()) or [{"params": []}]  # a pipeline's rank may hold frozen layers only
    if rules:
        matched = [[matching_parameters(model, pattern) for pattern in patterns] for _, patterns, _ in rules]
        kinds = {name: [name in set().union(*found) for found in matched] for name in trained}
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        flags = [[bool(some) for some in found] for found in matched]
        of_ranks, of_names, of_kinds = zip(*world.all_gather_json([flags, names, [*kinds.values()]]), strict=True)
        for (key, patterns, _), *found in zip(rules, *of_ranks, strict=True):
            require_matches(key, patterns, map(any, zip(*found, strict=True)), [*chain(*of_names)])
        groups = []
        for kind in sorted({tuple(kind) for kind in chain(*of_kinds)}):
            groups.append({"params": [trained[name] for name in trained if tuple(kinds[name]) == kind]})
            for _, _, values in compress(rules, kind):
                groups[-1] |= values
    optimizer = make(groups)
    for key, _, values in rules:
        for name in values.keys() - optimizer.defaults.keys():
            what = f"{key}: {type(optimizer).__name__} has no {name}, but {', '.join(optimizer.defaults)}"
            raise ConfigError(f"{what}; type {key}=[] or one of these")
    # torch's fused kernel of SGD fails where one weight has its first gradient later than another: momentum begins at
    # zero, which is what the first step makes of it.
    for group in optimizer.param_groups if trains and type(optimizer) is torch.optim.SGD else ():
        for parameter in group["params"] if group["fused"] and group["momentum"] and not group["dampening"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def can_fuse(model: nn.Module) -> bool:
    """Whether torch's fused optimizers can step on all weights: no complex ones, no parts of weights on several ranks,
    no sparse gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return not sparse_parameters(model) and all(p.is_floating_point() and local_part(p) is p for p in trained)


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for weights of two and more dimensions, another optimizer for all other parameters.
    torch.optim.Muon takes matrices only; here a filter (out, in, height, width) is a matrix of `out` rows. A parameter
    group with use_muon=false is the other optimizer's as a whole: an embedding, or the last layer. The decay is
    decoupled, as AdamW's. The Newton-Schulz iteration computes in the weights' own type."""

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
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(weight.grad)
                direction = weight.grad.add(velocity, alpha=group["momentum"]).flatten(1)  # Nesterov's
                scale = max(1.0, direction.shape[0] / direction.shape[1]) ** 0.5
                if self.normalised:
                    norm, scale = weight.norm(), 1.0  # of zeros, as a last layer may begin with them, none is scaled
                    weight.mul_(torch.where(norm > 0, len(weight) ** 0.5 / norm, 1.0))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(orthogonalised(direction, self.steps).view(weight.shape), alpha=group["lr"] * scale)
        self.others.step()


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
