"""Which parameters a model trains, step by step: some are unfrozen or frozen while a run goes on."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep.errors import ConfigError, first_of
from lockstep.strategies.base import Strategy


class TrainedParameters:
    """Follows what trains. A parameter that is unfrozen is updated from the step on in which that happens.

    optimizer: of the parameters that are trained at first. One that is unfrozen joins them.
    """

    def __init__(self, strategy: Strategy, optimizer: Optimizer) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        named = dict(strategy.model.named_parameters())
        self.known = {id(parameter) for parameter in named.values()}
        inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.others = {name: parameter for name, parameter in named.items() if id(parameter) not in inside}
        self.with_gradient = -1  # how many had one in the last step

    def after_backward(self, step: int) -> None:
        """The gradients of `step` are computed. Whoever was unfrozen in its forward pass is updated with the others.
        Averages the gradients that no backward pass has averaged.

        Raises ConfigError, in the step in which it happens, for what the strategy or the optimizer cannot follow.
        """
        if self.others and any(parameter.requires_grad for parameter in self.others.values()):
            self._take_in([name for name, parameter in self.others.items() if parameter.requires_grad], step)
        self.strategy.average_apart()

    def gradients(self, step: int) -> list[Tensor]:
        """Those of the parameters in the optimizer that have one. Raises ConfigError as `after_backward` does."""
        found = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if len(found) > self.with_gradient >= 0:
            self._begin_momentum(
                p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
            )
        if len(found) < self.with_gradient:
            named = self.strategy.model.named_parameters()
            frozen = [name for name, p in named if not p.requires_grad and name not in self.others]
            if frozen:
                self.strategy.freeze(f"{first_of(frozen)} was frozen in step {step}")
        self.with_gradient = len(found)
        return found

    def require_no_new(self, step: int) -> None:
        """Raise ConfigError for a parameter that the model did not have when the training began: no optimizer has it.

        Where ranks hold parts of parameters they are others in each step.
        """
        if self.strategy.shards_state:
            return
        new = [name for name, p in self.strategy.model.named_parameters() if id(p) not in self.known]
        if new:
            raise ConfigError(
                f"{first_of(new)} came into the model during the training, before the end of step {step}, so no "
                f"optimizer has it; make it in the model's __init__ and call requires_grad_(False) on it until it is "
                f"trained, and change it in place"
            )

    def unfreeze(self, names: Iterable[str]) -> None:
        """Those of `names` that are frozen are trained from now on, as the run that is resumed had unfrozen them."""
        found = [name for name in names if name in self.others]
        for name in found:
            self.others[name].requires_grad_(True)
        if found:
            self._take_in(found, 0)

    def _take_in(self, names: list[str], step: int) -> None:
        what = f"{first_of(names)} was unfrozen in step {step}"
        if len(self.optimizer.param_groups) > 1:
            raise ConfigError(
                f"{what}, and no rule says which of the {len(self.optimizer.param_groups)} parameter groups it is in; "
                f"type parameters.groups=[] parameters.no_decay=[], or leave it trained, with a learning rate of its "
                f"own"
            )
        parameters: list[nn.Parameter] = [self.others.pop(name) for name in names]
        self.strategy.unfreeze(parameters, what)
        self.optimizer.param_groups[0]["params"].extend(parameters)
        self._begin_momentum(parameters)

    def _begin_momentum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Of `parameters` that come later than others: torch's fused SGD takes all with a momentum, or none."""
        group = self.optimizer.param_groups[0]
        if isinstance(self.optimizer, SGD) and group["fused"] and group["momentum"]:
            for parameter in parameters:
                self.optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
