"""One replica per rank, gradients averaged while the backward pass runs (torch.nn.parallel.DistributedDataParallel)."""

import inspect
from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel

from lockstep.config.schema import Positive
from lockstep.strategies.base import Strategy, broadcast

# The second name is that of torch before 2.13.
ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
BUFFERS_IN_FORWARD = "forward_sync_buffers" if "forward_sync_buffers" in ARGUMENTS else "broadcast_buffers"


@dataclass
class DDP(Strategy):
    """A replica per rank (Li et al. 2020). `gradient_sync` says how gradients are averaged. In a world of one rank, and
    without trainable parameters, nothing is averaged and the model stays a plain module. Buffers are not broadcast
    before every forward pass, because batch norm does not read them in training, but before an evaluation."""

    bucket_cap_mb: Positive
    find_unused_parameters: bool
    name = "ddp"
    refused = ()

    def spread(self) -> None:
        world, parameters = self.world, list(self.model.parameters())
        if world.size == 1 or not any(parameter.requires_grad for parameter in parameters):
            return
        for tensor in (*parameters, *self.model.buffers()):
            broadcast([tensor])  # DDP does so with few types
        on_one_gpu = world.device.type == "cuda" and {parameter.device for parameter in parameters} == {world.device}
        self.module = wrapper = DistributedDataParallel(
            self.module,
            device_ids=[world.device.index] if on_one_gpu else None,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            **{BUFFERS_IN_FORWARD: False},  # type: ignore[arg-type]
        )
        self.gradient_divisor = world.size
        self.waits_for_gradients = not self.find_unused_parameters
        self.gradient_sync.attach(wrapper, world)
