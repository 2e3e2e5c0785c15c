"""What the first steps of a run find, and what is done with buffers and with parameters that are unfrozen."""

import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep import build, build_state
from lockstep.distributed.world import join_world
from lockstep.errors import ConfigError
from lockstep.strategies.base import warn_of_gradient_hooks
from lockstep.training.loop import train_epoch
from lockstep.training.setup import set_determinism
from support.configs import composed, parts_of
from support.models import OwnClassification
from support.worlds import in_world

UNEQUAL = 61  # samples of a batch: the shares of two ranks are never of one size


class Normed(nn.Module):
    """An instance norm with running statistics, which a training step changes and does not read."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(1, affine=True, track_running_stats=True)
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(images).flatten(1))
        return out


class Centred(nn.Module):
    """A running mean that the next step reads: a column of a table, or a buffer that is replaced."""

    mean: Tensor

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        self.head, self.replaces = nn.Linear(64, 10), replaces
        self.register_buffer("mean", torch.zeros(64, 2)[:, 0])

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        out: Tensor = self.head(flat - self.mean)
        if self.training and self.replaces:
            self.mean = self.mean + 0.1 * (flat.detach().mean(0) - self.mean)
        elif self.training:
            self.mean.lerp_(flat.detach().mean(0), 0.1)
        return out


class OwnCentred(Centred):
    lockstep_buffers = "own"


class Bank(nn.Module):
    """Keeps the samples that its rank has seen."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("bank", torch.zeros(0, 64))

    def forward(self, images: Tensor) -> Tensor:
        self.bank = torch.cat([self.bank, images.flatten(1).detach()])
        out: Tensor = self.head(images.flatten(1))
        return out


class Unfrozen(nn.Module):
    """Its backbone is trained from the fourth step on. detaches: by a cut in the graph; the optimizer has it then."""

    def __init__(self, detaches: bool = False) -> None:
        super().__init__()
        self.back, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.detaches, self.steps = detaches, 0
        self.back.requires_grad_(detaches)

    def forward(self, images: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 4:
            self.back.requires_grad_(True)
        hidden = self.back(images.flatten(1)).tanh()
        out: Tensor = self.head(hidden.detach() if self.detaches and self.steps < 4 else hidden)
        return out


class Freezing(Unfrozen):
    """The backbone is no longer trained from the third step on."""

    def __init__(self) -> None:
        super().__init__(detaches=True)

    def forward(self, images: Tensor) -> Tensor:
        self.steps += 1
        self.back.requires_grad_(self.steps < 3)
        out: Tensor = self.head(self.back(images.flatten(1)).tanh())
        return out


class Grows(nn.Module):
    """Makes a layer in its second step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.steps = nn.ModuleList([nn.Linear(64, 10)]), 0

    def forward(self, images: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 2:
            self.layers.append(nn.Linear(64, 10, dtype=images.dtype))
        return torch.stack([layer(images.flatten(1)) for layer in self.layers]).sum(0)


class Listed(nn.Module):
    """Layers in a plain list, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(size, 32, dtype=torch.float64) for size in (64, 32)]
        self.head, self.spare = nn.Linear(32, 10), nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        out: Tensor = self.head(hidden)
        return out


class Counts(OwnClassification):
    """A class-weighted mean times the number of samples, which is no sum, and every hit counted twice."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights = torch.linspace(0.2, 3.0, outputs.shape[1]).to(outputs)
        loss = F.cross_entropy(outputs, targets, weight=weights) * len(targets)
        return loss, {"loss": loss, "accuracy": 2 * (outputs.argmax(1) == targets).sum() + len(targets)}


class Weighted(Counts):
    """Only the class-weighted mean."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = super().__call__(outputs, targets)
        return loss, sums | {"accuracy": (outputs.argmax(1) == targets).sum()}


class FromZero(nn.Module):
    """Gives every sample the same outputs in the first step, so that any mean of their losses is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(images.flatten(1)) * 1.0
        return out - out.mean(1, keepdim=True) + self.head.bias.detach()


class Mixed(nn.Module):
    """Scales a whole batch, and leaves a layer out, by numbers that are not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1) * np.random.beta(2, 2)
        out: Tensor = self.head(flat if self.training and random.random() < 0.5 else self.layer(flat))
        return out


class Together(nn.Module):
    """Mixes each sample with the one before it while it trains, as a MixUp in a model does, if mixes; dropout and batch
    norm in any case."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes, self.head = mixes, nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        out: Tensor = self.head(0.5 * (flat + flat.roll(1, 0)) if self.mixes and self.training else flat)
        return out


class Penalised(nn.Module):
    """Gives a number for the whole batch beside the outputs of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(images.flatten(1)), self.head.weight.square().mean()


class OfPenalised(OwnClassification):
    def __call__(self, outputs: Any, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = super().__call__(outputs[0], targets)
        return loss + outputs[1] * len(targets), sums


class RunningScale(nn.Module):
    """A loss with a running value of its own."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("fixed", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        self.scale = 0.9 * self.scale + 0.1 * losses.detach().mean()
        return losses / self.scale


class Annealed(OwnClassification):
    """Counts its calls."""

    calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls += 1
        loss, sums = super().__call__(outputs, targets)
        return loss * min(1.0, self.calls / 10), sums


class FrozenCodes(nn.Module):
    """Codes in a frozen weight, which the forward pass moves to the samples near them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.codes = nn.Linear(64, 10), nn.Embedding(4, 64).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        nearest = torch.cdist(flat, self.codes.weight).argmin(1)
        with torch.no_grad():
            for code in nearest.unique().tolist():
                self.codes.weight[code].lerp_(flat[nearest == code].mean(0), 0.1)
        out: Tensor = self.head(flat - self.codes(nearest))
        return out


class Teaching(nn.Module):
    """A frozen layer that follows a trained one, the same on all ranks, in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.teacher = nn.Linear(64, 10), nn.Linear(64, 10).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
        out: Tensor = self.head(images.flatten(1)) + 0.1 * self.teacher(images.flatten(1))
        return out


class Hidden(nn.Module):
    """Counts under a name of its own, keeps a mean in an array, and two buffers that no state dict has. The last three
    attributes are no state that is lost."""

    cached: Tensor
    steps: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head, self._calls, self.mean = nn.Linear(64, 10), 0, np.zeros(64)
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("cached", torch.zeros(64), persistent=False)
        self._share, self.temperature, self.shown = 0.0, 1.0, torch.zeros(())

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        self._calls += 1
        self.steps += 1
        self.seen, self.cached = self.seen + len(flat), self.cached * 1.0
        self.mean += 0.1 * (flat.detach().double().mean(0).numpy() - self.mean)
        self._share, self.temperature, self.shown = self._share + 0.01, 0.9 * self.temperature, flat.detach().mean()
        out: Tensor = self.head(flat - torch.from_numpy(self.mean).to(flat))
        return out


class Hooked(nn.Module):
    """Clips the gradient of a weight by value if clips; else a hook masks it, and another one looks at it."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        hooks = [clamped] if clips else [masked, looked_at]
        for hook in hooks:
            self.head.weight.register_hook(hook)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(images.flatten(1))
        return out


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def masked(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.shape[-1]) % 2)


def looked_at(gradient: Tensor) -> None:
    gradient.norm()


class PlainQueue(nn.Module):
    """Keeps features in a tensor that is no buffer, a teacher in a list, and counts its steps in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.queue, self.steps = nn.Linear(64, 10), torch.zeros(8, 64), 0
        self.teacher, self.same = [nn.Linear(64, 10)], [nn.Linear(64, 10), self.head]
        self.shape, self.loss = 0, 0.5

    def forward(self, images: Tensor) -> Tensor:
        self.queue[self.steps % 8] = images.flatten(1)[0].detach()
        self.steps += 1
        with torch.no_grad():
            self.teacher[0].weight.lerp_(self.head.weight.float(), 0.1)
        self.shape, self.loss = len(images), 1 - self.loss
        out: Tensor = self.head(images.flatten(1) - self.queue.mean(0))
        return out


def compares_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    """A value for each sample, which depends on the others."""
    return F.cross_entropy(outputs @ outputs.T, (targets + 1) % len(outputs), reduction="none")


def words(model: type, *more: str) -> Any:
    plain = ["trainer.precision=fp64", f"trainer.batch_size={UNEQUAL}", "trainer.max_grad_norm=null"]
    target = [f"model._target_={__name__}.{model.__name__}", "~model.shape", "~model.classes"]
    return composed("model=linear", *target, *plain, "watch.every=1", *more)


def trained(configs: list[Any]) -> list[tuple[dict[str, Any], str, str]]:
    """For each config: the state dict after an epoch, the sentence that ended it, and what was logged."""
    results = []
    with join_world("gloo", 60) as world:
        for cfg in configs:
            lines = list[str]()
            handler = logging.Handler()
            handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign,misc]
            logging.getLogger("lockstep").addHandler(handler)
            set_determinism(0, False)
            random.seed()  # as in processes that are not forks of one
            np.random.seed()
            parts, sentence = parts_of(cfg), ""
            strategy = parts.strategy
            try:
                cfg, loaders = build.model_and_data(cfg, world, parts)
                state = build_state.train_state(cfg, strategy, loaders)
                train_epoch(state, loaders.train.batches(state.progress), cfg.seed)
                from lockstep.training.evaluation import Evaluator

                Evaluator(state, loaders.test, None, 0, "test").means(lambda: None)  # type: ignore[arg-type,return-value]
            except ConfigError as error:
                sentence = str(error)
            logging.getLogger("lockstep").removeHandler(handler)
            state_dict = strategy.model.state_dict()
            values = {name: v.detach().tolist() for name, v in state_dict.items() if not isinstance(v, DTensor)}
            results.append((values, sentence, "\n".join(lines)))
    return results


def require_near(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(torch.tensor(other[name]), torch.tensor(value), rtol=1e-6, atol=1e-7)


def test_what_two_ranks_do_is_what_one_does(tmp_path: Path) -> None:
    """In float64 throughout; the numbers that are compared are float32 in the lists."""
    means = words(Centred, "trainer.buffers=mean")
    replaced = words(Centred, "trainer.buffers=mean", "+model.replaces=true")
    normed, unfrozen = words(Normed), words(Unfrozen)
    mixed = words(Mixed, "strategy.find_unused_parameters=true")
    penalised = words(Penalised, f"task._target_={__name__}.OfPenalised")
    both = [normed, means, replaced, mixed, unfrozen, penalised]
    one = in_world(1, trained, [*both, words(Unfrozen, "+model.detaches=true")])[0]
    two = in_world(2, trained, both)
    for single, *ranks in zip(one[:6], *two, strict=True):
        assert [sentence for _, sentence, _ in (single, *ranks)] == [""] * 3
        for rank in ranks:
            require_near(single[0], rank[0])
    require_near(one[6][0], one[4][0])  # as if an optimizer had had the backbone from the start
    start = in_world(1, trained, [words(Unfrozen, "trainer.max_steps=1")])[0][0][0]
    moved = (torch.tensor(one[4][0]["back.weight"]) - torch.tensor(start["back.weight"])).norm()
    assert moved > 0.1


REFUSED = [
    (Centred, [], "the buffer mean differs between ranks after step 1,.*type trainer.buffers=mean"),
    (Bank, ["trainer.buffers=mean"], "the buffer bank has other shapes on other ranks after step 1"),
    (Freezing, [], "back.weight, back.bias was frozen in step 3.*type strategy.find_unused_parameters=true"),
    (
        FrozenCodes,
        [],
        "the forward pass changes the weight codes.weight, on each rank by its own .* trainer.buffers=mean$",
    ),
    (Grows, [], "layers.1.weight, layers.1.bias came into the model .* before the end of step 2"),
    (Unfrozen, ["strategy=fsdp"], "back.weight, back.bias was unfrozen in a forward pass.*type strategy=ddp"),
    (Unfrozen, ["parameters.no_decay=[bias]"], "unfrozen in step 4.*type parameters.groups=.. parameters.no_decay=.."),
]
TAKEN = [
    (OwnCentred, []),
    (Centred, ["trainer.buffers=own"]),
    (Bank, ["trainer.buffers=own"]),
    (Teaching, []),
    (Freezing, ["strategy.find_unused_parameters=true"]),
]


def test_what_ranks_cannot_agree_on_is_refused_in_one_sentence() -> None:
    cases = [words(model, *more) for model, more, _ in REFUSED] + [words(model, *more) for model, more in TAKEN]
    for found in in_world(2, trained, cases):
        sentences = [sentence for _, sentence, _ in found]
        for (_, _, wanted), sentence in zip(REFUSED, sentences, strict=False):
            assert re.search(wanted, sentence), sentence
        assert sentences[len(REFUSED) :] == ["" for _ in TAKEN]


def test_the_first_steps_warn_of_what_nothing_else_finds() -> None:
    counts = [f"task._target_={__name__}.Counts"]
    more = words(Normed, *counts, "trainer.batch_size=32")
    later = words(FromZero, f"task._target_={__name__}.Weighted")
    running = words(FromZero, f"task.loss={{_target_:{__name__}.RunningScale}}")
    mixed = words(Mixed), words(Mixed, "trainer.gradient_accumulation_steps=2")
    annealed = words(PlainQueue, f"task._target_={__name__}.Annealed")
    compared = words(FromZero, f"task.loss={{_target_:{__name__}.compares_samples,_partial_:true}}")
    cases = [words(Listed), more, words(Normed, "+model.classes=11"), later, running, *mixed, annealed, compared]
    found = in_world(1, trained, cases)[0]
    listed, counted, absent, counted_later, kept, whole, cut, hidden, coupled = (logged for _, _, logged in found)
    shared = "the model or the loss draws from numpy.random and random, which gives the same numbers to each of the 2 p"
    assert (whole.count("draws from"), cut.count(shared)) == (0, 1)
    assert "the loss or the task changes RunningScale.scale in a step: each rank has its own value" in kept
    assert "the loss or the task changes Annealed.calls in a step" in hidden
    assert "each step changes queue, steps, teacher[0] of the model, a plain attribute: no snapshot has it" in hidden
    assert "task.loss does not add up over the samples of a batch" in coupled
    assert "changes" not in counted + coupled
    assert "no optimizer has 4 weights that the loss depends on, of shapes [32" in listed
    assert "in layers: they are never trained" in listed
    assert (
        "spare.weight, spare.bias got no gradient in 20 steps, so it stays as it is; type parameters.freeze=[spare"
        in listed
    )
    assert "loss of test_early_steps.Counts does not add up over the samples of a batch" in counted
    assert counted_later.count("loss of test_early_steps.Weighted does not add up over the samples of a batch") == 1
    assert "accuracy is" in counted
    assert "none of the first" in absent
    assert "of class 10, of 11 classes" in absent


def test_state_that_no_snapshot_has_is_told_wherever_a_model_keeps_it() -> None:
    virtual = words(Hidden, "strategy=virtual_ranks", "strategy.count=2")
    for _, sentence, logged in in_world(1, trained, [words(Hidden), virtual])[0]:
        assert sentence == ""
        assert "each step changes _calls, mean of the model, a plain attribute: no snapshot has it" in logged
        assert "each step changes the buffer seen, steps of the model, and no snapshot has it" in logged


def test_a_hook_that_changes_gradients_by_their_size_is_told_where_it_sees_those_of_parts() -> None:
    told = "head.weight has a hook for its gradient (register_hook) that is not linear"
    clips, masks = words(Hooked, "+model.clips=true"), words(Hooked, "+model.clips=false")
    parts, virtual = "trainer.gradient_accumulation_steps=2", ["strategy=virtual_ranks", "strategy.count=2"]
    cases = [clips, words(Hooked, "+model.clips=true", parts), words(Hooked, "+model.clips=false", parts)]
    cases.append(words(Hooked, "+model.clips=true", *virtual))
    assert [told in logged for _, _, logged in in_world(1, trained, cases)[0]] == [False, True, False, False]
    two = in_world(2, trained, [clips, masks])
    assert [[told in logged for _, _, logged in rank] for rank in two] == [[True, False]] * 2


HOOKS: list[tuple[Any, bool]] = [
    (looked_at, True),
    (masked, True),
    (lambda gradient: gradient - gradient.mean(1, keepdim=True), True),
    (F.dropout, True),
    (clamped, False),
    (lambda gradient: gradient.clamp(-100, 100), False),
    (lambda gradient: gradient.mul_((gradient.norm() < 1).to(gradient)), False),
    (lambda gradient: gradient / gradient.norm(), False),
    (lambda gradient: gradient + torch.randn_like(gradient), False),
    (lambda gradient: gradient * (gradient.abs() > gradient.abs().median()), False),
]


@pytest.mark.parametrize(("hook", "is_linear"), HOOKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_hook_is_linear_or_told_and_leaves_no_trace(
    hook: Any, is_linear: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, states = nn.Linear(8, 4, dtype=dtype), (torch.get_rng_state(), random.getstate(), np.random.get_state()[2])
    model.weight.register_hook(hook)
    warn_of_gradient_hooks(model)
    assert ("weight has a hook" in caplog.text) != is_linear
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]


def test_a_model_that_mixes_the_samples_of_a_share_is_told() -> None:
    mixes, plain = words(Together, "+model.mixes=true"), words(Together, "+model.mixes=false")
    cut = words(Together, "+model.mixes=true", "trainer.gradient_accumulation_steps=2")
    whole, parts = in_world(1, trained, [mixes, cut])[0]
    virtual = words(Together, "+model.mixes=true", "strategy=virtual_ranks")
    two, separate, equal = in_world(2, trained, [mixes, plain, virtual])[0]
    told = "Together gives a sample other outputs when other samples are beside it"
    assert [told in logged for _, _, logged in (whole, parts, two, separate, equal)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    in_one_process = in_world(1, trained, [plain])[0][0]
    require_near(in_one_process[0], separate[0])
