"""One net over several devices of one rank: neighbouring layers share a device, activations travel."""

import torch

from lockstep.refusal import Refusal
from lockstep.strategy import ddp


def model_parallel(module, world, devices, **options):
    """Put the children of `module`, in equal groups of neighbours, on `devices` devices of this rank.

    Fits a net that calls its children one after another, in their order. Outputs come back to the rank's first device,
    where inputs start. With several ranks each holds a replica; `options` are those of `ddp`.
    """
    mine = own_devices(world, devices)
    for group, device in zip(groups(module, devices), mine, strict=True):
        for child in group.values():
            child.to(device)
            child.register_forward_pre_hook(lambda _, inputs, device=device: tuple(tensor.to(device) for tensor in inputs))
    module.register_forward_hook(lambda net, inputs, outputs: outputs.to(mine[0]))
    return ddp(module, world, **options)


def own_devices(world, count):
    """The `count` devices of this rank. On GPUs every rank's first is world.device, and no two ranks share one."""
    if world.device.type != "cuda":
        return [world.device] * count
    gpus = torch.cuda.device_count()
    if world.local_size * count > gpus:
        raise Refusal(
            f"strategy=model_parallel wants {count} GPUs for each of {world.local_size} ranks and this machine has {gpus}; "
            f"try strategy.devices={max(1, gpus // world.local_size)}, fewer ranks, or backend=gloo"
        )
    return [torch.device("cuda", world.local_rank + number * world.local_size) for number in range(count)]


def groups(module, count):
    """The children of `module` in `count` groups of neighbours, [{name: child}, ...], alike in their number of layers with
    parameters; layers without follow the one before them.

    Raises Refusal where there are fewer layers with parameters than groups.
    """
    children = list(module.named_children())
    heavy = [index for index, (_, child) in enumerate(children) if any(True for _ in child.parameters())]
    if len(heavy) < count:
        raise Refusal(f"this model's {len(heavy)} layers with parameters cannot be laid in {count} places; try model=mlp model.depth={count - 1}")
    starts = [0, *(int(part[0]) for part in torch.tensor(heavy).tensor_split(count)[1:]), len(children)]
    return [dict(children[start:end]) for start, end in zip(starts, starts[1:], strict=False)]
