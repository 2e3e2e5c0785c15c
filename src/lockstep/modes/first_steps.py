"""What mode=check does in one world of ranks: it takes the first steps of the run, as a training does, and keeps what
each stage of a step computed, so that the step can be compared with the same one of another world.
"""

import copy
import logging
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep import build, build_state
from lockstep.compat import is_of_transform
from lockstep.config.nodes import instantiate_as
from lockstep.config.schema import RunConfig
from lockstep.data.loader import Loader
from lockstep.data.reader import Request
from lockstep.data.source import tensors_in
from lockstep.distributed import signals
from lockstep.distributed.old_world import gather_state, unsynced_batch_norms
from lockstep.distributed.world import OtherData, join_world, require_same_data
from lockstep.errors import ConfigError, TrainingDiverged, exits_are_failures, first_of
from lockstep.failures import reporter
from lockstep.loggers.rank_logs import rank_logs
from lockstep.modes.check import ONE, REREAD, Variant
from lockstep.preflight import Parts
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.state import collect_state, plain_copy, restore_state
from lockstep.strategies.base import Strategy, UnusedParameters
from lockstep.training.buffers import BuffersDiffer
from lockstep.training.loop import train_epoch
from lockstep.training.setup import set_determinism
from lockstep.training.state import TrainState
from lockstep.training.watchers import Watcher
from lockstep.training.weight_check import digest, local_part

SAMPLES_READ = 8  # twice
NO_STEP = "not checked: there is no first step"
SAVED = "saved.pt"  # the state of one rank after its first step
STAGES = ("start", "samples", "layers", "loss", "gradients", "weights")

Trace = dict[str, dict[str, Tensor]]
"""Of a step, for each of `STAGES`: {name: tensor}. start: digests of the initial weights. samples, layers: for each
sample of the batch two sums over the inputs, and over what a layer returned for it, in the order of the calls. loss,
gradients, and weights with the buffers after the step: of the whole model."""


@dataclass(frozen=True)
class Facts:
    """What a world of ranks has found, as sentences. Plain values: a pipe carries them."""

    unchecked: str = NO_STEP  # why its numbers are not compared
    likely: list[str] = field(default_factory=list)  # why they depend on the number of ranks, if they do
    numbers: list[str] = field(default_factory=list)  # why they do, whatever the first step shows
    resume: list[str] = field(default_factory=list)  # why a resumed run is another one
    fits: list[str] = field(default_factory=list)  # why model and data cannot be trained as they are
    failed: str = ""  # the error that has ended it
    notes: list[str] = field(default_factory=list)  # lines about what breaks no promise

    fingerprint: str = ""  # of the training data
    second_epoch: list[int] = field(default_factory=list)  # digests of samples; two ranks read them before the first
    draws: bool = False  # whether a forward pass draws random numbers
    coarsest: str = "fp64"  # the precision of the weights with the fewest bits
    trained: int = 0  # how many numbers have a gradient


def find_facts(config: RunConfig, parts: Parts, folder: Path, variant: Variant, may_fail: bool) -> Facts:
    """What one rank does in the world of `variant`. It leaves what its steps computed in `folder`.

    may_fail: an error of the step is a fact. Some models cannot compute in float64.
    """
    signals.listen()
    strategy = parts.strategy
    needs_all = not config.strategy.get("find_unused_parameters", True)
    if needs_all and not strategy.shards_state:  # a rank alone would see what it lacks, while others wait for it
        config = config.changed({"strategy.find_unused_parameters": True})
        strategy = instantiate_as(Strategy, config.strategy, "strategy")
        parts = replace(parts, strategy=strategy)
    with rank_logs() as logs, exits_are_failures("this rank left before the end of the check"), reporter.failures():
        logs.leave_console()  # warnings are shown below the table, once
        with join_world(**vars(config.backend), bind_device=strategy.binds_one_device()) as world:
            reporter.set_hang_rules(config.watch.timeout, config.watch.on_hang, world.timeout)
            random.seed()  # as in the processes of a launcher that does not fork
            np.random.seed()
            set_determinism(config.seed, config.trainer.deterministic, config.trainer.tf32)
            try:
                config, loaders = build.model_and_data(config, world, parts)
                loader = loaders.train
                fingerprint = data_fingerprint(loader.reader.dataset)
                require_same_data(world, "training data", len(loader), fingerprint)
                state = build_state.train_state(config, strategy, loaders)
                facts = replace(FirstSteps(state, loader, variant, folder, needs_all).take(), fingerprint=fingerprint)
            except OtherData as error:
                facts = Facts(resume=[f"the {error.name} is another one at each start: draw it from a seed of its own"])
            except Exception as error:
                if not may_fail:
                    raise
                facts = Facts(failed=" ".join(str(error).split()))
        warnings = [record.getMessage() for record in logs.kept if record.levelno >= logging.WARNING]
    return replace(facts, notes=[*facts.notes, *(f"warning: {text}" for text in dict.fromkeys(warnings))])


class _Enough(Exception):
    """The steps that were needed are taken."""


class FirstSteps(Watcher):
    """Takes the first steps of a run, and keeps those of `variant` in `folder`.

    needs_all: whether each parameter must get a gradient.
    """

    def __init__(self, state: TrainState, loader: Loader, variant: Variant, folder: Path, needs_all: bool) -> None:
        self.state, self.loader, self.variant, self.folder = state, loader, variant, folder
        self.needs_all, self.world, self.model = needs_all, state.strategy.world, state.strategy.model
        self.facts = Facts()
        self.scheduler_as_built = copy.deepcopy(state.scheduler.state_dict())
        weights = self._whole(dict(self.model.named_parameters()))
        self.trace: Trace = {"start": {name: digest(value).cpu() for name, value in weights.items()}}
        self.by_sample = dict[str, list[Tensor]]()  # {layer and call: its sums, for each part of this rank}
        self.rows, self.calls = 0, Counter[str]()  # of the forward pass that goes on; 0: none does
        self.used = set[str]()  # parameters that get a gradient in this step
        self.unused = list[str]()  # those that get none, on some rank

    def take(self) -> Facts:
        """Take the steps, and read some samples before and after them. A collective."""
        state, loader = self.state, self.loader
        if 1 not in self.variant.steps:
            restore_state(state, torch.load(self.folder / SAVED, weights_only=True))
        reads_again = loader.memory is None and not loader.is_stream
        epochs = (0, 1) if self.world.size == 1 else (1, 0)  # what a data set keeps of one must not change the other
        read = {epoch: _read(loader, epoch) for epoch in epochs if reads_again}
        if loader.is_stream:
            self.facts.notes.append(
                "iterable: samples come in the data set's own order, and every rank reads all of them"
            )
        self.model.register_forward_pre_hook(self._before_forward)
        for name, module in self.model.named_modules():
            kind = type(module).__name__
            module.register_forward_hook(partial(self._after_layer, f"{name} ({kind})" if name else kind))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._use, name))
        stream = loader.batches(state.progress)
        try:
            while not state.finished:
                train_epoch(state, stream, loader.seed, watchers=[self])
        except _Enough:
            pass
        except TrainingDiverged as error:
            self.facts.fits.append(str(error))
        except (BuffersDiffer, UnusedParameters) as error:
            self.facts = replace(self.facts, unchecked=str(error))
        if reads_again and _read(loader, turn=-1) != read[0]:
            self.facts.resume.append(REREAD)
        self._tell_causes()
        return replace(self.facts, second_epoch=read.get(1, []))

    def _tell_causes(self) -> None:
        state, strategy = self.state, self.state.strategy
        unsynced, norms_see = unsynced_batch_norms(self.model), strategy.batch_norm_sees()
        if unsynced and norms_see:
            advice = "sync_bn=auto" if strategy.supports_sync_bn else "strategy=ddp, or a model without batch norm"
            self.facts.likely.append(f"batch norm sees {norms_see}: {first_of(unsynced)}; type {advice}")
        buffers = [*state.buffers.averaged, *state.buffers.own]
        if buffers:
            self.facts.likely.append(
                f"a rank changes {first_of(buffers)} by its own share, and the ranks' mean is not what one rank has; "
                f"gather the samples of all ranks in the module"
            )
        if self.facts.draws and state.noise is None:
            self.facts.likely.append(
                "the ranks of this strategy draw dropout and noise for their own parts of the model; type "
                "strategy=ddp, or model.dropout=0 if the model has it"
            )
        elif state.noise is not None and state.noise.drawn_by_rank:
            self.facts.likely.append(state.noise.drawn_by_rank)
        if state.early_steps.shared_draws:
            self.facts.likely.append(state.early_steps.shared_draws)
        if self.unused and self.needs_all:
            self.facts.numbers.append("parameters without a gradient, see below")
            self.facts.fits.append(
                f"parameters without a gradient: {first_of(self.unused)}; type strategy.find_unused_parameters=true, "
                f"or parameters.freeze=[{','.join(self.unused[:4])}]"
            )
        for name in state.early_steps.no_sums:
            self.facts.numbers.append(
                f"the {name} of the task does not add up over the samples of a batch; return a sum"
            )
        if state.early_steps.unowned:
            self.facts.fits.append(state.early_steps.unowned)

    def _use(self, name: str, parameter: Tensor) -> None:
        self.used.add(name)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        self.rows = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
        self.calls.clear()
        self._after_layer("samples", module, (), inputs)

    def _after_layer(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.calls[name] += 1
        call = f", call {self.calls[name]}" if self.calls[name] > 1 else ""
        sums = sums_by_sample(outputs, self.rows) if self.rows else None
        if sums is not None:
            self.by_sample.setdefault(name + call, []).append(sums)
        if module is self.model and name != "samples":
            self.rows = 0  # a checkpointed block computes again in the backward pass

    def on_gradients_ready(self) -> None:
        used, self.used = self.used, set()
        named = list(self.model.named_parameters())
        gradients = {name: p.grad.detach() for name, p in named if p.grad is not None}
        gradients = {name: g.to_dense() if g.is_sparse else g.clone() for name, g in gradients.items()}
        self.trace["gradients"] = self._whole(gradients)
        shards = self.state.strategy.shards_state  # the gradient is that of other tensors
        unused = [n for n, p in named if p.requires_grad and (p.grad is None if shards else n not in used)]
        everyones = self.world.all_gather_json(unused)
        self.unused = list(dict.fromkeys(name for names in [self.unused, *everyones] for name in names))
        not_finite = [name for name, value in gradients.items() if not local_part(value).isfinite().all()]
        if not_finite and not self.state.scaler.is_enabled():  # it looks for the scale at which they are finite
            self.facts = replace(self.facts, unchecked="not checked: the gradients of the first step are not finite")
            self.facts.fits.append(f"NaN or infinite gradients: {first_of(not_finite)}")
        noise, seeded = self.state.noise, torch.Generator().manual_seed(torch.initial_seed())  # as the step began
        has_moved = not torch.equal(seeded.get_state(), torch.default_generator.get_state())
        draws = any(self.world.all_gather_json(has_moved or (noise is not None and noise.has_drawn)))
        sizes = [torch.finfo(p.dtype).bits for _, p in named if p.is_floating_point() or p.is_complex()]
        coarsest = {64: "fp64", 32: "fp32"}.get(min(sizes, default=64), "bf16")
        trained = sum(value.numel() for value in gradients.values())
        self.facts = replace(self.facts, draws=draws, coarsest=coarsest, trained=trained)

    def after_step(self, samples: int) -> None:
        state, step = self.state, self.state.progress.step
        self._keep(step)
        if self.variant == ONE and step == 1:
            try:
                saved = collect_state(state, state.meter.totals(), self.scheduler_as_built, state.strategy.full_state)
                torch.save(plain_copy(saved), self.folder / SAVED)
            except ConfigError as error:  # a snapshot cannot hold it
                self.facts.resume.append(str(error))
        if step == self.variant.steps[-1]:
            raise _Enough

    def _keep(self, step: int) -> None:
        """Rank 0 writes the trace of `step`, with the samples of all ranks in an order that does not depend on them."""
        averages = {} if self.state.ema is None else self._whole(self.state.ema.state())
        self.trace["weights"] = self._whole(self.model.state_dict())
        self.trace["weights"] |= {f"the average of {name}": value for name, value in averages.items()}
        self.trace["loss"] = {"loss": torch.tensor(self.state.meter.means()["loss"], dtype=torch.float64)}
        ranks = gather_state(self.world, {name: torch.cat(sums) for name, sums in self.by_sample.items()})
        self.by_sample = {}
        if self.world.is_rank_zero:
            names = [name for name in ranks[0] if all(name in rank for rank in ranks)]
            by_sample = {name: torch.cat([rank[name] for rank in ranks]) for name in names}
            samples = by_sample.pop("samples", torch.zeros(0, 2))
            order = samples.sum(1).argsort()
            layers = {name: sums[order] for name, sums in by_sample.items() if len(sums) == len(order)}
            trace = self.trace | {"samples": {"samples": samples[order]}, "layers": layers}
            torch.save(trace, self.folder / f"{self.variant.name}-{step}.pt")
        if self.facts.unchecked == NO_STEP:
            self.facts = replace(self.facts, unchecked="")

    def _whole(self, named: dict[str, Any]) -> dict[str, Tensor]:
        """Tensors of the whole model, on rank 0."""
        whole = self.state.strategy.full_state(named)
        tensors = {name: value.detach().cpu() for name, value in whole.items() if isinstance(value, Tensor)}
        dense = {name: v if v.layout == torch.strided else v.to_dense() for name, v in tensors.items()}
        return {name: (torch.view_as_real(v) if v.is_complex() else v).clone() for name, v in dense.items()}


def sums_by_sample(values: Any, rows: int) -> Tensor | None:
    """(rows, 2) in float64: two sums over what each of `rows` samples has in `values`. None: nothing is by samples."""
    total = None
    for tensor in tensors_in(values):
        if is_of_transform(tensor) or tensor.layout != torch.strided:
            continue
        if not tensor.numel() or not tensor.dim() or len(tensor) % rows:
            continue
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        flat = (real if real.dtype == torch.float64 else real.float()).reshape(rows, -1)
        weighted = flat * torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
        sums = torch.stack([weighted.sum(1), weighted.abs().sum(1)], 1).double().cpu() / flat.shape[1]
        total = sums if total is None else 1.5 * total + sums
    return total


def _read(loader: Loader, epoch: int = 0, turn: int = 1) -> list[int]:
    """Digests of the first samples of an epoch, in their order. turn: -1 to read them backwards."""
    reader, numbers = loader.reader, range(min(SAMPLES_READ, len(loader.reader)))
    read = {number: reader.read(Request(epoch, 0, np.array([number]))) for number in numbers[::turn]}
    return [int(digest(tensor)) for number in numbers for tensor in tensors_in(read[number])]


# How far two worlds are apart.


def compare(folder: Path, one: Variant, other: Variant) -> dict[str, dict[str, float]]:
    """How far the step of `other` is apart from that of `one`, see `differences`. Empty if one has not taken it."""
    files = [folder / f"{variant.name}-{other.steps[0]}.pt" for variant in (one, other)]
    if not all(file.exists() for file in files):
        return {}
    first, second = (torch.load(file, weights_only=True) for file in files)
    return differences(first, second, exact=other.steps[0] > 1)


def differences(one: Trace, other: Trace, exact: bool) -> dict[str, dict[str, float]]:
    """{stage: {name: how far two traces are apart there, relative to the largest value of the tensor}}.

    Rounding leaves something of a gradient or of a running mean that is zero, and an optimizer such as Adam makes a
    whole step of it. So gradients are compared with a hundredth of the largest of all at least, weights and buffers
    with a thousandth of the largest weight, and weights only where they had a gradient. exact: bits are compared.
    """
    gradients, weights = one["gradients"], [one["weights"][name] for name in one["start"] if name in one["weights"]]
    floors = dict.fromkeys(STAGES, 0.0)
    if not exact:
        floors["gradients"] = 1e-2 * max(map(_largest, gradients.values()), default=0.0)
        floors["weights"] = 1e-3 * max(map(_largest, weights), default=0.0)
    apart: dict[str, dict[str, float]] = {stage: {} for stage in STAGES}
    for stage in STAGES:
        for name, value in one[stage].items():
            theirs = other[stage].get(name)
            if stage in ("samples", "layers") and (theirs is None or theirs.shape != value.shape):
                continue  # a part of the model that this world's ranks do not call, or call for other samples
            is_moved = stage == "weights" and name in gradients and not exact
            left_out = gradients[name].abs() < floors["gradients"] if is_moved else None
            apart[stage][name] = _distance(value, theirs, floors[stage], left_out)
    return apart


def _distance(one: Tensor, other: Tensor | None, floor: float, left_out: Tensor | None) -> float:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    first, second = one.double(), other.double()
    if not torch.equal(first.isfinite(), second.isfinite()):
        return float("inf")
    distance = (first - second).abs().nan_to_num(0.0)  # both are NaN there, or infinite
    if left_out is not None:
        distance = distance.masked_fill(left_out, 0)
    if not distance.numel() or not distance.any():
        return 0.0
    return float(distance.max() / max(floor, _largest(one), 1e-30))


def _largest(value: Tensor) -> float:
    """The largest finite number of `value`, whatever its sign."""
    finite = value.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0
