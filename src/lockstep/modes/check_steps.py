"""What mode=check measures in one world of ranks: its first steps, and what they hold."""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.dataset import tensors_in
from lockstep.data.loader import BatchLoader
from lockstep.distributed.sync_batch_norm import BatchNorm, SyncBatchNorm
from lockstep.errors import TrainingDiverged
from lockstep.training.loop import train_epoch
from lockstep.training.state import TrainState
from lockstep.training.timing import Watcher, peak_memory
from lockstep.training.weight_check import digest, local_part

TIMED_STEPS = 5  # after the first one, which takes longer
TIMED_SECONDS = 1.0

Named = dict[str, Tensor]


@dataclass
class Facts:
    """What a world of `ranks` ranks found. Plain values: a pipe carries them.

    unsynced: names of batch norms that are not synchronised. digests: of the weights before the first step.
    has_step: whether the first step was taken. loss: of it. seconds: of a later one. diverged: why one of the steps was
    none. failed: the error of a step in float64. other_data: the data that is not alike on the ranks, such as "test
    data". unused, not_finite: names of parameters without a gradient, or with a NaN or an infinite one. trained: how
    many numbers have one. nbytes: what this rank holds. peak: MiB of the process. batch: samples of a step. steps: of
    an epoch, and of the whole run. fingerprint: of the training data. first_samples: the digests of some.
    """

    ranks: int
    unsynced: list[str] = field(default_factory=list)
    digests: dict[str, int] = field(default_factory=dict)
    has_step: bool = False
    loss: float | None = None
    seconds: float | None = None
    diverged: str | None = None
    failed: str | None = None
    other_data: str | None = None
    unused: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    trained: int = 0
    nbytes: dict[str, int] = field(default_factory=dict)
    peak: float = 0.0
    batch: int = 0
    steps: tuple[int, int] = (0, 0)
    fingerprint: str = ""
    first_samples: list[int] = field(default_factory=list)


class _Enough(Exception):
    """The steps that were wanted are taken."""


class FirstSteps(Watcher):
    """Takes the first steps of a run. The first one is kept: `gradients`, before clipping, and `weights` after it.

    timed: take more steps, for their time.
    """

    def __init__(self, state: TrainState, timed: bool) -> None:
        self.state, self.timed, self.gradients, self.ends = state, timed, Named(), list[float]()
        self.whole: dict[str, Named] = {}
        model = state.strategy.model
        self.facts = Facts(
            ranks=state.strategy.world.size,
            unsynced=unsynced_batch_norms(model),
            digests={name: int(digest(value)) for name, value in self._whole(dict(model.named_parameters())).items()},
        )

    def take(self, loader: BatchLoader, folder: Path) -> Facts:
        """Take the steps. Rank 0 writes what it kept to <number of ranks>.pt in `folder`. A collective."""
        try:
            train_epoch(self.state, loader, watchers=[self])
        except _Enough:
            pass
        except TrainingDiverged as error:
            self.facts.diverged = str(error)
        if self.state.strategy.world.is_rank_zero:
            torch.save(self.whole, folder / f"{self.facts.ranks}.pt")
        times = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        self.facts.seconds = statistics.median(times) if times else None
        settings = self.state.settings
        self.facts.batch = settings.batch_size
        self.facts.steps = settings.steps_per_epoch(len(loader)), settings.total_steps(len(loader))
        self.facts.peak = peak_memory(self.state.strategy.world.device)
        return self.facts

    def on_gradients_ready(self) -> None:
        if self.gradients:
            return
        named, facts = list(self.state.strategy.model.named_parameters()), self.facts
        self.gradients = {name: _copy(p.grad) for name, p in named if p.grad is not None}
        facts.unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if not self.state.scaler.is_enabled():  # it looks for the scale at which gradients are finite
            not_finite = [name for name, value in self.gradients.items() if not local_part(value).isfinite().all()]
            facts.not_finite = not_finite
        facts.trained = sum(value.numel() for value in self.gradients.values())
        facts.nbytes = {"parameters": nbytes(p for _, p in named), "gradients": nbytes(self.gradients.values())}

    def after_step(self, samples: int) -> None:
        state, facts = self.state, self.facts
        if not self.ends:
            facts.has_step, facts.loss = True, state.meter.means()["loss"]
            facts.nbytes["optimizer state"] = nbytes(tensors_in(dict(state.optimizer.state)))
            held = {"weights": state.strategy.model.state_dict(), "gradients": self.gradients}
            self.whole = {what: self._whole(named) for what, named in held.items()}
        self.ends.append(time.perf_counter())
        enough = not self.timed or len(self.ends) > TIMED_STEPS or self.ends[-1] - self.ends[0] > TIMED_SECONDS
        fails_next = bool(facts.unused) and facts.ranks > 1  # in DistributedDataParallel
        if any(state.strategy.world.all_gather_json(enough or fails_next)):
            raise _Enough

    def _whole(self, named: dict[str, Any]) -> Named:
        """Tensors of the whole model, on rank 0."""
        whole = self.state.strategy.full_state(named)
        return {name: value.detach().cpu().clone() for name, value in whole.items() if isinstance(value, Tensor)}


def _copy(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def nbytes(tensors: Any) -> int:
    """What this rank holds of `tensors`."""
    return sum(local_part(tensor).nbytes for tensor in tensors)


def unsynced_batch_norms(model: nn.Module) -> list[str]:
    """Their names in `model`."""
    synced = (SyncBatchNorm, nn.SyncBatchNorm)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and not isinstance(module, synced)
    ]


def differences(one: dict[str, Named], two: dict[str, Named]) -> dict[str, float]:
    """{"gradients": ..., "weights": ...}: how far two worlds are apart, at most, relative to a tensor's largest value.

    Rounding leaves something of a gradient that is zero, and an optimizer such as Adam makes a whole step of it. So
    gradients are compared with a hundredth of the largest of all at least, and weights only where they had one.
    """
    gradients = one["gradients"]
    floor = 1e-2 * max(map(_largest, gradients.values()), default=0.0)
    found = {"gradients": 0.0, "weights": 0.0}
    for name, value in gradients.items():
        found["gradients"] = max(found["gradients"], _apart(value, two["gradients"].get(name), floor))
    for name, value in one["weights"].items():
        noise = gradients[name].abs() < floor if name in gradients else torch.zeros((), dtype=torch.bool)
        other = two["weights"].get(name)
        found["weights"] = max(found["weights"], _apart(value, other, 0.0, noise))
    return found


def _apart(one: Tensor, other: Tensor | None, floor: float, left_out: Tensor | None = None) -> float:
    if other is None or one.shape != other.shape:
        return float("inf")
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    apart = (one.double() - other.double()).abs().nan_to_num(0.0)  # both are NaN there, or infinite
    if left_out is not None:
        apart = apart.masked_fill(left_out, 0)
    if not apart.numel() or not apart.any():
        return 0.0
    return float(apart.max() / max(floor, _largest(one), 1e-30))


def _largest(value: Tensor) -> float:
    """The largest finite number of `value`, whatever its sign."""
    finite = value.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0
