"""Optimizers that torch has in parts only."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Len
from torch import Tensor

from lockstep.config.schema import Count, Fraction, NotNegative, Positive

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration: they bring all singular values near 1


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, torch.optim.Muon) for matrices, AdamW for all other parameters.

    A parameter group with use_muon=false is AdamW's as a whole: an embedding, or the last layer. Of several groups each
    may have its own lr, momentum, betas and weight_decay. Muon computes in bfloat16, so runs at different numbers of
    ranks agree to its rounding.

    lr: learning rate of the matrices.
    momentum: momentum of the matrices.
    weight_decay: decoupled weight decay.
    adamw_lr: learning rate of all other parameters.
    betas: AdamW's decay of the two moments.
    fused: one kernel for all weights of AdamW; auto: where torch can.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Positive,
        momentum: Fraction,
        weight_decay: NotNegative,
        adamw_lr: Positive,
        betas: Annotated[Sequence[Fraction], Len(2, 2)],
        fused: bool | Literal["auto"] | None,
    ) -> None:
        groups = _as_groups(params)
        matrices = [_part(group, True, _is_matrix) for group in groups]
        others = [_part(group, False, _is_matrix) for group in groups]
        self.muon = torch.optim.Muon(matrices, lr, momentum=momentum, weight_decay=weight_decay)
        self.adamw = torch.optim.AdamW(
            others, adamw_lr, (betas[0], betas[1]), weight_decay=weight_decay, fused=fused is True
        )
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


class MuonWithSGD(torch.optim.Optimizer):
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
        groups = _as_groups(params)
        of_muon = {"lr": lr, "momentum": momentum}
        of_sgd = {"lr": sgd_lr, "momentum": sgd_momentum}
        matrices = [of_muon | _part(group, True, _is_filter) | {"use_muon": True} for group in groups]
        others = [of_sgd | _part(group, False, _is_filter) | {"use_muon": False} for group in groups]
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


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them -> groups."""
    groups = list(params)
    return groups if groups and isinstance(groups[0], dict) else [{"params": groups}]


def _part(group: dict[str, Any], of_muon: bool, suits_muon: Callable[[Tensor], bool]) -> dict[str, Any]:
    """The group with those of its parameters that are Muon's, or with the others."""
    is_muons = [group.get("use_muon", True) and suits_muon(parameter) for parameter in group["params"]]
    chosen = [parameter for parameter, is_one in zip(group["params"], is_muons, strict=True) if is_one == of_muon]
    return group | {"params": chosen}


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() == 2


def _is_filter(parameter: Tensor) -> bool:
    return parameter.dim() >= 2


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
