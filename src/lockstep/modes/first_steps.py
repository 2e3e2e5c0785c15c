"""What mode=check finds in one world of ranks: what is drawn at random, and what its first steps compute and hold."""

import copy
import logging
import random
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lockstep import build
from lockstep.config.targets import instantiate_as
from lockstep.data.dataset import tensors_in
from lockstep.data.loader import BatchLoader
from lockstep.distributed import signals
from lockstep.distributed.sync_batch_norm import unsynced_batch_norms
from lockstep.distributed.world import OtherData, World, init_distributed, require_same_data
from lockstep.errors import ConfigError, TrainingDiverged, exits_are_failures
from lockstep.failures import reporter
from lockstep.loggers.rank_logs import rank_logs
from lockstep.snapshots.data_fingerprint import data_fingerprint
from lockstep.snapshots.state import collect_state, plain_copy, restore_state
from lockstep.strategies.base import Strategy
from lockstep.training.buffers import BuffersDiffer
from lockstep.training.loop import batches, set_seed, train_epoch
from lockstep.training.setup import autocast, set_determinism
from lockstep.training.state import TrainState
from lockstep.training.timing import peak_memory
from lockstep.training.watchers import Watcher
from lockstep.training.weight_check import digest, local_part

SAMPLES_READ = 8  # twice
TIMED_STEPS = 5  # after the first one, which takes longer
TIMED_SECONDS = 1.0
SAVED, SECOND = "saved.pt", "second.pt"  # what one rank leaves: its state after a step, and its second step
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Named = dict[str, Tensor]


@dataclass
class Facts:
    """What a world of `ranks` ranks found. Plain values: a pipe carries them."""

    ranks: int
    failed: str | None = None  # the error of a step in float64
    other_data: str | None = None  # the data that is not the same on all ranks, such as "test data"
    notes: list[str] = field(default_factory=list)  # lines about what breaks no promise

    # Before the first step.
    unsynced: list[str] = field(default_factory=list)  # names of batch norms that are not synchronised
    digests: dict[str, int] = field(default_factory=dict)  # of the weights
    fingerprint: str = ""  # of the training data
    first_samples: list[int] = field(default_factory=list)  # digests of some

    # Of one rank: whether samples, and what the model and the loss compute, are other ones the second time.
    samples_drawn: bool = False
    outputs_drawn: bool = False
    seed_counts: bool = False  # whether what they compute depends on the seed, which is another one on each rank
    dropouts: list[str] = field(default_factory=list)  # names of modules that make it do so

    # The first step.
    has_step: bool = False
    loss: float | None = None
    unused: list[str] = field(default_factory=list)  # names of parameters without a gradient
    not_finite: list[str] = field(default_factory=list)  # with a NaN or an infinite one
    trained: int = 0  # how many numbers have a gradient
    diverged: str | None = None  # why this step or a later one was none

    # What a training would warn of, or refuse.
    no_sums: list[str] = field(default_factory=list)  # what the task returns as a sum, and is none
    unowned: str = ""  # weights that no optimizer has
    parting: str = ""  # the sentence about buffers that differ between ranks
    buffers: list[str] = field(default_factory=list)  # those that each rank changes by its own share

    # Saved after the first step, and loaded by a new process that takes the second one.
    resume_failed: str = ""  # why that cannot be done
    resumed: dict[str, list[str]] = field(default_factory=dict)  # {gradients or weights: names of those that differ}

    # What it takes.
    nbytes: dict[str, int] = field(default_factory=dict)  # {what: bytes} that this rank holds
    peak: float = 0.0  # MiB of the process
    seconds: float | None = None  # of a later step
    batch: int = 0  # samples of a step
    steps: tuple[int, int] = (0, 0)  # of an epoch, and of the whole run


@dataclass(frozen=True)
class Variant:
    """How a world takes the first steps.

    timed: look at what is drawn, and take some steps for their time. Otherwise take the first step alone, in float64,
        which some models cannot compute in: that is no failure then.
    resumes: go on from what one rank has saved after its first step, and compare the second step with its own.
    """

    timed: bool = False
    resumes: bool = False


def find_facts(cfg: DictConfig, folder: Path, variant: Variant) -> Facts:
    """What one rank of a world of one or two ranks does. Rank 0 writes what its first step computed to `folder`."""
    signals.listen()
    strategy = instantiate_as(Strategy, cfg.strategy, "strategy")
    with rank_logs() as logs, exits_are_failures("this rank left before the end of the check"), reporter.failures():
        logs.leave_console()  # warnings are shown below the table, once
        with init_distributed(**cfg.backend, bind_device=strategy.binds_one_device()) as world:
            reporter.watch_for_hangs(cfg.watch.timeout, cfg.watch.on_hang, world.timeout)
            random.seed()  # as in the processes of a launcher that does not fork
            np.random.seed()
            set_determinism(cfg.seed, cfg.trainer.deterministic)
            try:
                facts = _build_and_step(cfg, world, strategy, folder, variant)
            except OtherData as error:
                facts = Facts(world.size, other_data=error.name)
            except (ConfigError, RuntimeError, TypeError) as error:
                if variant.timed:
                    raise
                facts = Facts(world.size, failed=str(error).partition("\n")[0])
        warnings = [record.getMessage() for record in logs.kept if record.levelno >= logging.WARNING]
    return replace(facts, notes=[*facts.notes, *(f"warning:   {text}" for text in dict.fromkeys(warnings))])


def _build_and_step(cfg: DictConfig, world: World, strategy: Strategy, folder: Path, variant: Variant) -> Facts:
    cfg, loader, _ = build.model_and_data(cfg, world, strategy)
    fingerprint = data_fingerprint(loader.dataset)
    require_same_data(world, "training data", len(loader), fingerprint)
    steps = FirstSteps(build.train_state(cfg, strategy, loader), loader, fingerprint, variant, folder)
    return steps.resume() if variant.resumes else steps.take()


class _Enough(Exception):
    """The steps that were needed are taken."""


class FirstSteps(Watcher):
    """Takes the first steps of a run. Of the first one it keeps the gradients, before clipping, and the weights.

    facts: an attribute, what it has found so far.
    """

    def __init__(
        self, state: TrainState, loader: BatchLoader, fingerprint: str, variant: Variant, folder: Path
    ) -> None:
        """fingerprint: of the training data. folder: of what worlds leave for each other."""
        self.state, self.loader, self.timed, self.folder = state, loader, variant.timed, folder
        self.saves = variant.timed and state.strategy.world.size == 1
        self.scheduler_as_built = copy.deepcopy(state.scheduler.state_dict())
        self.facts = Facts(state.strategy.world.size, fingerprint=fingerprint)
        self.gradients, self.ends = Named(), list[float]()
        self.whole: dict[str, Any] = {}

    def take(self) -> Facts:
        """Look at what is drawn, and take the steps. A collective.

        Rank 0 writes what it kept to <number of ranks>.pt in the folder.
        """
        settings, world, loader = self.state.settings, self.state.strategy.world, self.loader
        if loader.reader is not None and not loader.is_stream:
            self.facts.first_samples = [int(digest(tensor)) for tensor in _read(loader)]
        if self.timed and world.size == 1:
            self._look_at_draws()
        model = self.state.strategy.model
        self.facts.unsynced = unsynced_batch_norms(model)
        parameters = self._whole(dict(model.named_parameters()))
        self.facts.digests = {name: int(digest(value)) for name, value in parameters.items()}
        try:
            train_epoch(self.state, loader, watchers=[self])
        except _Enough:
            pass
        except TrainingDiverged as error:
            self.facts.diverged = str(error)
        except BuffersDiffer as error:
            self.facts.parting = str(error)
        if world.is_rank_zero:
            torch.save(self.whole, self.folder / f"{world.size}.pt")
        state = self.state
        self.facts.no_sums, self.facts.unowned = state.early_steps.no_sums, state.early_steps.unowned or ""
        self.facts.buffers = [*state.buffers.averaged, *state.buffers.own]
        times = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        self.facts.seconds = statistics.median(times) if times else None
        self.facts.batch = settings.batch_size
        self.facts.steps = settings.steps_per_epoch, settings.total_steps
        self.facts.peak = peak_memory(world.device)
        return self.facts

    def resume(self) -> Facts:
        """Load what one rank has saved after its first step, take the next one, and compare it with that rank's."""
        saved = torch.load(self.folder / SAVED, weights_only=True)
        self.whole = torch.load(self.folder / SECOND, weights_only=True)
        try:
            restore_state(self.state, saved)
        except (RuntimeError, ConfigError) as error:  # of load_state_dict
            self.facts.resume_failed = " ".join(str(error).split())
            return self.facts
        with suppress(_Enough):
            train_epoch(self.state, self.loader, watchers=[self])
        return self.facts

    def _save(self) -> None:
        state = self.state
        contents = collect_state(state, state.meter.totals(), self.scheduler_as_built, state.strategy.full_state)
        torch.save(plain_copy(contents), self.folder / SAVED)

    def _look_at_draws(self) -> None:
        """What is drawn outside the seeds: read some samples twice, and compute the first batch three times."""
        state, loader = self.state, self.loader
        model = state.strategy.model.train()
        self.facts.dropouts = [
            name for name, part in model.named_modules() if isinstance(part, DROPOUTS) and part.p > 0
        ]
        part = next(iter(batches(state, loader, slice(0, 1)))).parts[0]
        saved = model.state_dict().keys()  # what a snapshot keeps: other state has to be found
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name in saved}
        computed: list[list[Tensor]] = []
        with torch.no_grad(), autocast(state.strategy.world.device, state.settings.precision):
            for seed in (0, 0, 1):
                set_seed(seed)
                outputs = state.strategy.module(part.inputs)
                both = outputs, state.task(outputs, part.targets)
                computed.append([tensor.clone() for tensor in tensors_in(both)])
                # A model may have put new tensors in the place of its buffers, so they are found by their names.
                for name, buffer in model.named_buffers():
                    if name in buffers and buffer.shape == buffers[name].shape:
                        buffer.copy_(buffers[name])
        first, again, other = computed
        self.facts.outputs_drawn, self.facts.seed_counts = not _same(first, again), not _same(first, other)
        if loader.reader is not None:  # the second time backwards; a stream has its order
            self.facts.samples_drawn = not _same(_read(loader), _read(loader, turn=1 if loader.is_stream else -1))
        if loader.is_stream:
            note = "iterable:  samples come in the data set's own order, and every rank reads all of them"
            self.facts.notes.append(note)

    def on_gradients_ready(self) -> None:
        if len(self.ends) > 1:
            return
        named = list(self.state.strategy.model.named_parameters())
        gradients = {name: p.grad.detach() for name, p in named if p.grad is not None}
        self.gradients = {name: g.to_dense() if g.is_sparse else g.clone() for name, g in gradients.items()}
        if self.ends:
            return
        self.facts.unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if not self.state.scaler.is_enabled():  # it looks for the scale at which gradients are finite
            not_finite = [name for name, value in self.gradients.items() if not local_part(value).isfinite().all()]
            self.facts.not_finite = not_finite
        self.facts.trained = sum(value.numel() for value in self.gradients.values())
        self.facts.nbytes = {"parameters": nbytes(p for _, p in named), "gradients": nbytes(self.gradients.values())}

    def after_step(self, samples: int) -> None:
        state = self.state
        now = {"weights": state.strategy.model.state_dict(), "gradients": self.gradients}
        if self.whole and "second" in self.whole:
            for what, unbroken in self.whole["second"].items():
                whole = self._whole(now[what])
                others = [name for name in unbroken if name not in whole or not _same([unbroken[name]], [whole[name]])]
                self.facts.resumed[what] = others
            raise _Enough
        if self.saves and len(self.ends) == 1:
            second = {what: self._whole(named) for what, named in now.items()}
            torch.save({"second": second}, self.folder / SECOND)
        if not self.ends:
            self.facts.has_step, self.facts.loss = True, state.meter.means()["loss"]
            self.facts.nbytes["optimizer state"] = nbytes(tensors_in(dict(state.optimizer.state)))
            self.whole = {what: self._whole(named) for what, named in now.items()}
            if self.saves:
                self._save()
        self.ends.append(time.perf_counter())
        enough = not self.timed or len(self.ends) > TIMED_STEPS or self.ends[-1] - self.ends[0] > TIMED_SECONDS
        fails_next = bool(self.facts.unused) and self.facts.ranks > 1  # in DistributedDataParallel
        if any(state.strategy.world.all_gather_json(enough or fails_next)):
            raise _Enough

    def _whole(self, named: dict[str, Any]) -> Named:
        """Tensors of the whole model, on rank 0."""
        whole = self.state.strategy.full_state(named)
        tensors = {name: value.detach().cpu() for name, value in whole.items() if isinstance(value, Tensor)}
        return {name: (torch.view_as_real(v) if v.is_complex() else v).clone() for name, v in tensors.items()}


def _read(loader: BatchLoader, turn: int = 1) -> list[Tensor]:
    """The tensors of the first samples of an epoch, in their order. turn: -1 to read them backwards."""
    samples = loader.samples
    numbers = list(range(min(SAMPLES_READ, len(samples))))
    read = samples.read([(0, number) for number in numbers[::turn]])
    collated = samples.collate(read._replace(numbers=read.numbers[::turn], samples=read.samples[::turn]))
    if isinstance(collated, ConfigError):
        raise collated
    return list(tensors_in(collated))


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit by bit, but that a NaN is like a NaN."""
    return all(torch.equal(first.nan_to_num(), second.nan_to_num()) for first, second in zip(one, other, strict=True))


def nbytes(tensors: Iterable[Tensor]) -> int:
    """What this rank holds of `tensors`."""
    return sum(local_part(tensor).nbytes for tensor in tensors)


# How far two worlds are apart.


def differences(one: dict[str, Named], two: dict[str, Named]) -> dict[str, float]:
    """{"gradients": ..., "weights": ...}: how far two worlds are apart, at most, relative to a tensor's largest value.

    Rounding leaves something of a gradient that is zero, and an optimizer such as Adam makes a whole step of it. So
    gradients are compared with a hundredth of the largest of all at least, and weights only where they had one.
    """
    gradients = one["gradients"]
    floor = 1e-2 * max(map(_largest, gradients.values()), default=0.0)
    apart = {"gradients": 0.0, "weights": 0.0}
    for name, value in gradients.items():
        apart["gradients"] = max(apart["gradients"], _distance(value, two["gradients"].get(name), floor))
    for name, value in one["weights"].items():
        noise = gradients[name].abs() < floor if name in gradients else torch.zeros((), dtype=torch.bool)
        apart["weights"] = max(apart["weights"], _distance(value, two["weights"].get(name), 0.0, noise))
    return apart


def _distance(one: Tensor, other: Tensor | None, floor: float, left_out: Tensor | None = None) -> float:
    if other is None or one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    distance = (one.double() - other.double()).abs().nan_to_num(0.0)  # both are NaN there, or infinite
    if left_out is not None:
        distance = distance.masked_fill(left_out, 0)
    if not distance.numel() or not distance.any():
        return 0.0
    return float(distance.max() / max(floor, _largest(one), 1e-30))


def _largest(value: Tensor) -> float:
    """The largest finite number of `value`, whatever its sign."""
    finite = value.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0
