"""One process that feeds several devices."""

import logging

from torch.nn.parallel import DataParallel

from lockstep.refusal import Refusal
from lockstep.strategy import bare

log = logging.getLogger(__name__)


def dp(module, world, first_share):
    """Copy `module` to every GPU for each batch, and send each a part of it (torch.nn.DataParallel).

    first_share: as in `sizes`. Where there is no GPU the module stays as it is. Raises Refusal in a world of several ranks.
    """
    if world.size > 1:
        raise Refusal(f"strategy=dp is one process that feeds several devices, and here are {world.size}; type strategy=ddp, or start one process")
    if world.device.type != "cuda":
        log.info("strategy=dp finds no GPU here: a plain module on %s trains the same", world.device)
        return module
    return Balanced(module, first_share)


class Balanced(DataParallel):
    """DataParallel whose first device, which also gathers outputs and gradients, may take a smaller share of each batch."""

    def __init__(self, module, first_share):
        super().__init__(module)
        self.first_share = first_share

    def scatter(self, inputs, kwargs, device_ids):
        (batch,) = inputs
        parts = zip(batch.split(sizes(len(batch), len(device_ids), self.first_share)), device_ids, strict=True)
        sent = [(part.to(device, non_blocking=True),) for number, (part, device) in enumerate(parts) if number == 0 or len(part)]
        return sent, [kwargs] * len(sent)


def sizes(samples, devices, first_share):
    """How many of `samples` each device gets: the first about `first_share` times as many as another, the others alike.

    The first, which holds the weights, gets at least one.
    """
    first = samples if devices == 1 else min(samples, max(1, round(samples * first_share / (devices - 1 + first_share))))
    each, more = divmod(samples - first, max(1, devices - 1))
    return [first, *(each + (number < more) for number in range(devices - 1))]


@bare.register
def _(module: DataParallel):
    return module.module
