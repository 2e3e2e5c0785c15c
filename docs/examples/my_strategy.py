"""A strategy: strategy._target_=my_strategy.AverageAfterBackward"""

from lockstep.strategies.base import Strategy


class AverageAfterBackward(Strategy):
    """One all-reduce for each parameter, after the backward pass of a step's last part."""

    def forward_backward(self, part, loss, weight, last, outputs=None):
        super().forward_backward(part, loss, weight, last, outputs)
        if last:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    self.world.all_reduce_sum(parameter.grad)
