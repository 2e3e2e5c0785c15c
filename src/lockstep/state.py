"""A run's weights, optimizer state and average as one whole net's, under the model's own names, whatever the strategy.

That is what a snapshot holds, so it moves between strategies and world sizes.
"""

import torch
from torch.utils._pytree import tree_map_only

from lockstep.strategy import bare, own, whole


def weights(model):
    """The state dict of the whole net, on rank 0. Every rank calls this."""
    return whole(model, bare(model).state_dict())


def collect(model, optimizer, average):
    """What `restore` brings back, complete on rank 0. Every rank calls this."""
    names, indexed = _names(model), optimizer.state_dict()
    state = whole(model, {names[index]: values for index, values in indexed["state"].items()})
    groups = [{key: value for key, value in group.items() if key != "params"} for group in indexed["param_groups"]]
    averaged = None if average is None else whole(model, average.values)
    return {"model": weights(model), "optimizer": {"state": state, "param_groups": groups}, "average": averaged}


def restore(model, optimizer, average, saved):
    """Bring model, optimizer and average, on every rank, to what `collect` gave, perhaps in a world of another kind."""
    bare(model).load_state_dict(own(model, saved["model"]))
    state, indexed = _laid_out(model, saved["optimizer"]["state"]), optimizer.state_dict()
    groups = [old | {"params": now["params"]} for old, now in zip(saved["optimizer"]["param_groups"], indexed["param_groups"], strict=True)]
    optimizer.load_state_dict({"state": {index: state[name] for index, name in enumerate(_names(model)) if name in state}, "param_groups": groups})
    if average is not None:
        average.values = _laid_out(model, saved["average"] or {})


def _names(model):
    """The parameters' names, in the order in which an optimizer numbers them."""
    return [name for name, _ in bare(model).named_parameters()]


def _laid_out(model, named):
    """This rank's part of `named`, in its parameters' type and memory layout: fused optimizers read both side by side."""
    parameters = dict(bare(model).named_parameters())

    def like(parameter, tensor):
        return torch.empty_like(parameter).copy_(tensor) if tensor.shape == parameter.shape else tensor

    with torch.no_grad():
        return {name: tree_map_only(torch.Tensor, lambda t, p=parameters[name]: like(p, t), tree) for name, tree in own(model, named).items()}
