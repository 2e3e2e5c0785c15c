"""The optimizer of a run: parameter groups by rule, and Muon beside another one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Len
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
        match: Any = group["match"]
        patterns = [str(each) for each in (match if isinstance(match, list | tuple) else [match])]
        values = {name: value for name, value in group.items() if name != "match"}
        rules.append(("parameters.groups", patterns, values))
    if parameters.no_decay:
        rules.append(("parameters.no_decay", [*map(str, parameters.no_decay)], {"weight_decay": 0.0}))
    return rules


def require_fit(optimizer: Optimizer, rules: Sequence[Rule]) -> None:
    """Raise ConfigError for a rule with a hyperparameter that the optimizer does not have: torch would keep it, and
    never read it."""
    for key, _, values in rules:
        for name in values:
            if name not in optimizer.defaults:
                what = f"{key}: {type(optimizer).__name__} has no {name}, but {', '.join(optimizer.defaults)}"
                raise ConfigError(f"{what}; type {key}=[] or one of these")


def parameter_groups(model: nn.Module, world: World, rules: Sequence[Rule]) -> list[Any]:
    """What an optimizer takes: the trained parameters, in groups if there are rules. A collective.

    rules: of several that match a parameter, the last one wins. The groups and their order are the same on all ranks,
    though a rank may hold only some layers: a group can be empty. Raises ConfigError for a pattern that no rank has.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not rules:
        return list(trained.values()) or [{"params": []}]  # a rank of a pipeline may hold frozen layers only
    matched = [[matching_parameters(model, pattern) for pattern in patterns] for _, patterns, _ in rules]
    kinds = {name: [name in set().union(*found) for found in matched] for name in trained}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    everyones = world.all_gather_json([[[bool(some) for some in found] for found in matched], names, [*kinds.values()]])
    of_all = [name for _, there, _ in everyones for name in there]
    for (key, patterns, _), *found in zip(rules, *(flags for flags, _, _ in everyones), strict=True):
        require_matches(key, patterns, map(any, zip(*found, strict=True)), of_all)
    groups = []
    for kind in sorted({tuple(kind) for _, _, there in everyones for kind in there}):
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


class MuonWithAdamW(Optimizer):
    """Muon (Jordan et al. 2024, torch.optim.Muon) for matrices, AdamW for all other parameters.

    A parameter group with use_muon=false is AdamW's as a whole: an embedding, or the last layer. Of several groups each
    may have its own lr, momentum, betas and weight_decay. Muon computes in bfloat16, so runs at different numbers of
    ranks agree to its rounding.

    lr: learning rate of the matrices.
    momentum: momentum of the matrices.
    weight_decay: decoupled weight decay.
    adamw_lr: learning rate of all other parameters.
    betas: AdamW's decay of the two moments.
    fused: one kernel for all weights of AdamW; null: where torch can.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Positive,
        momentum: Fraction,
        weight_decay: NotNegative,
        adamw_lr: Positive,
        betas: Annotated[Sequence[Fraction], Len(2, 2)],
        fused: bool | None,
    ) -> None:
        matrices, others = _parted(params, lambda weight: weight.dim() == 2)
        self.muon = torch.optim.Muon(matrices, lr, momentum=momentum, weight_decay=weight_decay)
        decays = betas[0], betas[1]
        self.adamw = torch.optim.AdamW(others, adamw_lr, decays, weight_decay=weight_decay, fused=fused is True)
        known = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": tuple(betas), "use_muon": True}
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], known)
        self._share()

    def _share(self) -> None:
        """Both parts work on this optimizer's groups and state."""
        count = len(self.param_groups) // 2
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        self.muon.state = self.adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # load_state_dict puts new groups and a new state in place
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()


class MuonWithSGD(Optimizer):
    """Muon (Jordan et al. 2024) for weights of two and more dimensions, SGD with Nesterov's momentum for the rest.

    A filter (out, in, height, width) is taken as a matrix of `out` rows. Before each step a weight of Muon's is scaled
    to the norm sqrt(out), so it needs no weight decay. A parameter group with use_muon=false is SGD's as a whole. Of
    several groups each may have its own lr, momentum and weight_decay. The Newton-Schulz iteration computes in the
    weights' own type.

    lr: learning rate of the filters and matrices.
    momentum: momentum of the filters and matrices.
    steps: steps of the Newton-Schulz iteration.
    sgd_lr: learning rate of all other parameters.
    sgd_momentum: momentum of all other parameters.
    weight_decay: weight decay of all other parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Positive,
        momentum: Fraction,
        steps: Count,
        sgd_lr: Positive,
        sgd_momentum: Fraction,
        weight_decay: NotNegative,
    ) -> None:
        matrices, others = _parted(params, lambda weight: weight.dim() >= 2)
        of_muon, of_sgd = {"lr": lr, "momentum": momentum}, {"lr": sgd_lr, "momentum": sgd_momentum}
        matrices = [of_muon | group | {"use_muon": True} for group in matrices]
        others = [of_sgd | group | {"use_muon": False} for group in others]
        known = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps, "use_muon": True}
        super().__init__([*matrices, *others], known)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["use_muon"]:
                    norm = parameter.norm()  # of zeros, as a last layer may begin with them, nothing is scaled
                    parameter.mul_(torch.where(norm > 0, len(parameter) ** 0.5 / norm, 1.0))
                    matrix = self._direction(parameter, parameter.grad, group["momentum"]).flatten(1)
                    update = orthogonalised(matrix, group["steps"]).view(parameter.shape)
                else:
                    gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
                    update = self._direction(parameter, gradient, group["momentum"])
                parameter.sub_(update, alpha=group["lr"])

    def _direction(self, parameter: Tensor, gradient: Tensor, momentum: float) -> Tensor:
        """Nesterov's momentum."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity: Tensor = state["momentum_buffer"]
        velocity.mul_(momentum).add_(gradient)
        return gradient.add(velocity, alpha=momentum)


def _parted(params: Iterable[Any], is_matrix: Callable[[Tensor], bool]) -> list[list[dict[str, Any]]]:
    """Parameters, or groups of them -> groups with what is Muon's, and as many with the others."""
    groups = list(params)
    groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    return [
        [
            group
            | {"params": [p for p in group["params"] if (group.get("use_muon", True) and is_matrix(p)) == of_muon]}
            for group in groups
        ]
        for of_muon in (True, False)
    ]


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
