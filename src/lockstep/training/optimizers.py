"""Optimizers that torch has in parts only."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, torch.optim.Muon) for matrices, AdamW for all other parameters.

    A parameter group with use_muon=false is AdamW's as a whole: an embedding, or the last layer. Of several groups each
    may have its own lr, momentum, betas and weight_decay. Muon computes in bfloat16, so runs at different numbers of
    ranks agree to its rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float,
        weight_decay: float,
        adamw_lr: float,
        betas: Sequence[float],
    ) -> None:
        groups = list(params)
        if not (groups and isinstance(groups[0], dict)):
            groups = [{"params": groups}]
        matrices = [_part(group, of_muon=True) for group in groups]
        others = [_part(group, of_muon=False) for group in groups]
        self.muon = torch.optim.Muon(matrices, lr, momentum=momentum, weight_decay=weight_decay)
        self.adamw = torch.optim.AdamW(others, adamw_lr, (betas[0], betas[1]), weight_decay=weight_decay)
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


def _part(group: dict[str, Any], of_muon: bool) -> dict[str, Any]:
    """The group with those of its parameters that are Muon's, or with the others."""

    def is_muons(parameter: Tensor) -> bool:
        return parameter.dim() == 2 and group.get("use_muon", True)

    return group | {"params": [parameter for parameter in group["params"] if is_muons(parameter) == of_muon]}
