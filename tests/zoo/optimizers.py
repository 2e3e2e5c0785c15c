"""The optimizers of the zoo: wrappers, and state of odd kinds."""

from collections import deque

import torch
from torch.optim import SGD, Optimizer


class Lookahead(Optimizer):
    """An optimizer around another one, with slow weights beside the state of that one (Zhang et al. 2019)."""

    def __init__(self, params, lr):
        self.base, self.steps = SGD(params, lr, momentum=0.9), 0
        self.param_groups, self.defaults, self.state = self.base.param_groups, self.base.defaults, self.base.state
        self.slow = [parameter.detach().clone() for parameter in self._parameters()]

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for parameter, slow in zip(self._parameters(), self.slow, strict=True):
                parameter.copy_(slow.add_(parameter - slow, alpha=0.5))

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict() | {"slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.slow, self.steps = list(state_dict["slow"]), state_dict["steps"]
        self.base.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.param_groups, self.state = self.base.param_groups, self.base.state


class Counting(SGD):
    """A number that belongs to no parameter, in the state under a word."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)

    def step(self, closure=None):
        state = self.state
        state.setdefault("all", {"steps": 0})["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= state["all"]["steps"]
        super().step()


class OddState(Optimizer):
    """State of other types and shapes than the weights, as of 8-bit optimizers; lists, None, Python's numbers."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                state = self.state[parameter]
                if not state:
                    codes = torch.full((parameter.numel(),), 128, dtype=torch.uint8)
                    state.update(codes=codes, scale=torch.ones(1).half(), counts=[torch.zeros(2), 0], nothing=None)
                momentum = (state["codes"].double() - 128) / 128 * state["scale"].double()
                momentum = 0.9 * momentum + parameter.grad.to_dense().flatten().double()
                state["scale"] = momentum.abs().max().clamp(min=1e-3).half().view(1)
                scaled = (momentum / state["scale"].double()).clamp(-1, 0.99)
                state["codes"] = (scaled * 128 + 128).round().to(torch.uint8)
                state["counts"] = [state["counts"][0] + 1, state["counts"][1] + 1]
                rate = group["lr"] / float(state["counts"][0][0] + state["counts"][1])
                parameter.sub_((rate * momentum).view(parameter.shape))


class Recent(SGD):
    """The gradient is the mean of the last four, which are kept in a deque."""

    def __init__(self, params, lr):
        super().__init__(params, lr)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    last = self.state[parameter].setdefault("last", deque(maxlen=4))
                    last.append(parameter.grad.clone())
                    parameter.grad = torch.stack(list(last)).mean(0)
        super().step()
