"""What a combination must give, by plain torch: one process, float64, and none of this project's code but its order."""

import copy
import itertools
import math
from dataclasses import dataclass
from threading import RLock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from lockstep.data.partition import generator
from zoo import data, optimizers
from zoo.modules import net

BATCH, EPOCHS, LR = 9, 2, 0.05
STATISTICS = ("running_mean", "running_var")
DRAWING = RLock()  # torch has one generator for all threads


@dataclass
class Numbers:
    """What an option does to the numbers of a training. All of it is in the fields' names."""

    accumulation: int = 1
    clip: float | None = None
    ema: float | None = None
    adamw: bool = False
    own: str = ""  # one of zoo.optimizers
    frozen: str = ""
    slow: str = ""  # parameters with a tenth of the learning rate
    cosine: bool = False
    one_cycle: bool = False  # with no momentum
    batch: int = BATCH
    steps: int = 1000


def trained(kind, numbers, model):
    """The state dict after the training, or its moving average, and the loss of the test data.

    model: with the first weights.
    """
    truth = data.TRUTHS[kind](True)
    fast, slow = [], []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not (numbers.frozen and name.startswith(numbers.frozen)))
        (slow if numbers.slow and name.startswith(numbers.slow) else fast).append(parameter)
    groups = [{"params": fast, "lr": LR}, *([{"params": slow, "lr": LR / 10}] if slow else [])]
    if numbers.own:
        optimizer = getattr(optimizers, numbers.own)(groups, lr=LR)
    elif numbers.adamw:
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0 if numbers.one_cycle else 0.9)
    peaks = [group["lr"] for group in optimizer.param_groups]
    count, average = len(truth.images), {}
    total = EPOCHS * -(-count // numbers.batch)
    one_cycle = OneCycleLR(optimizer, peaks, total_steps=total + 1, cycle_momentum=False) if numbers.one_cycle else None
    model.train()
    orders = [torch.randperm(count, generator=generator(0, epoch)).split(numbers.batch) for epoch in range(EPOCHS)]
    for step, batch in enumerate(itertools.islice(itertools.chain(*orders), numbers.steps)):
        if numbers.cosine:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * 0.5 * (1 + math.cos(math.pi * step / total))
        optimizer.zero_grad()
        for part in batch.tensor_split(min(numbers.accumulation, len(batch))):
            share = counted(truth.targets[part], truth.task) / counted(truth.targets[batch], truth.task)
            (share * loss(model(truth.images[part]), truth.targets[part], truth.task)).backward()
        if numbers.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), numbers.clip)
        optimizer.step()
        if one_cycle is not None:
            one_cycle.step()
        now, decay = averaged(model), numbers.ema or 0.0
        average = {name: decay * average[name] + (1 - decay) * value for name, value in now.items()} if average else now
    state = copy.deepcopy(dict(model.state_dict()))  # an evaluation may change it
    if numbers.ema:
        state |= average
        model.load_state_dict(state)
    model.eval()
    test = data.TRUTHS[kind](False)
    with torch.no_grad():
        return state, float(loss(model(test.images), test.targets, test.task))


def averaged(model):
    """Copies of parameters, and of the running statistics of norms; no other buffer has a mean."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        if name in names or name.rpartition(".")[2] in STATISTICS
    }


def counted(targets, task):
    """What a mean is taken over."""
    return float(targets[:, 1].sum()) if task == "weighted" else len(targets)


def loss(outputs, targets, task):
    if task == "weighted":
        losses = F.cross_entropy(outputs, targets[:, 0].long(), reduction="none")
        return (losses * targets[:, 1]).sum() / targets[:, 1].sum()
    if task == "segmentation":
        return F.cross_entropy(outputs, targets, ignore_index=data.IGNORED)
    if task == "multi_label":
        return F.binary_cross_entropy_with_logits(outputs, targets.double())
    if task == "regression":
        return F.mse_loss(outputs.reshape(targets.shape), targets.double())
    return F.cross_entropy(outputs, targets.double() if targets.is_floating_point() else targets)


def new_net(body, kind):
    """The net for the targets of a kind of data, with weights that are drawn now."""
    places = 36 if data.TRUTHS[kind](True).task == "segmentation" else 1
    with DRAWING:
        return net(body, [1, 6, 6], 1 if kind == "amounts" else data.CLASSES, places)


def first_model(body, kind):
    """The net with the weights that a run of seed 0 begins with: `seeded(0)` is torch.manual_seed(0)."""
    truth = data.TRUTHS[kind](True)
    with DRAWING:
        torch.manual_seed(0)
        model = new_net(body, kind)
        cast(model)
        with torch.no_grad():
            if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
                model.eval()(truth.images[:2])
    return model


def cast(model):
    """float32 and complex64 become float64 and complex128; all other types stay."""
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.to(wider.get(tensor.dtype, tensor.dtype))
