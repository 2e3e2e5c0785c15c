"""The screen of launch=dry: what a rank of a planned job holds, computes and sends."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from lockstep.data.dataset import tensors_in
from lockstep.data.loader import BatchLoader
from lockstep.data.partition import shares_in_words
from lockstep.distributed.dry_world import Traffic
from lockstep.modes.check import bytes_shown, held
from lockstep.modes.check_steps import nbytes
from lockstep.training.loop import train_epoch
from lockstep.training.state import TrainState
from lockstep.training.timing import Watcher


class _Taken(Exception):
    """The first step is taken."""


@dataclass
class PlannedRank:
    """What rank `rank` held and sent in its first step: {what: bytes} on this rank, of the whole model, and in a shard.

    The last two are known only if this rank knows all weights.
    """

    rank: int
    traffic: Traffic
    held: dict[str, int] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    shard: dict[str, int] = field(default_factory=dict)

    def note(self, what: str, tensors: Iterable[Tensor], ranks: int) -> None:
        tensors = list(tensors)
        self.held[what] = nbytes(tensors)
        self.whole[what] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.shard[what] = sum(largest_part(tensor, ranks) for tensor in tensors)


@dataclass(frozen=True)
class Job:
    """ranks, and the shares that they cut a batch into. batch: samples of a step. samples: of an epoch.

    steps: of an epoch, and of the whole run.
    """

    ranks: int
    shares: int
    batch: int
    samples: int
    steps: tuple[int, int]


def largest_part(tensor: Tensor, ranks: int) -> int:
    """Bytes of the largest of the parts that strategy=fsdp cuts `tensor` into. A number is on every rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return -(-rows // ranks) * tensor.numel() // max(rows, 1) * tensor.element_size()


class FirstStep(Watcher):
    """Takes the first step of a run, and notes what this rank holds in it and sends."""

    def __init__(self, planned: PlannedRank, state: TrainState) -> None:
        self.planned, self.state, self.ranks = planned, state, state.strategy.world.size

    def take(self, loader: BatchLoader) -> None:
        with suppress(_Taken):
            train_epoch(self.state, loader, watchers=[self])

    def on_gradients_ready(self) -> None:
        parameters = list(self.state.strategy.model.parameters())
        self.planned.note("parameters", parameters, self.ranks)
        self.planned.note("gradients", [p.grad for p in parameters if p.grad is not None], self.ranks)

    def after_step(self, samples: int) -> None:
        self.planned.note("optimizer state", tensors_in(dict(self.state.optimizer.state)), self.ranks)
        raise _Taken


def lines(job: Job, planned: Sequence[PlannedRank]) -> list[str]:
    """planned: the first rank, and some of the others."""
    epoch, whole = job.steps
    found = [
        f"a batch:    {job.batch} samples{shares_in_words(job.batch, job.ranks, job.shares)}",
        f"steps:      {epoch} in an epoch, {whole} in the run{_last_batch(job)}",
    ]
    for rank in planned:
        traffic = rank.traffic
        sent, received = bytes_shown(traffic.sent), bytes_shown(traffic.received)
        name = f"rank {rank.rank}:"
        found.append(f"{name.ljust(11)} {held(rank.held)}; a step sends {sent} and receives {received}")
    first = planned[0]
    for kind, calls in first.traffic.calls.items():
        found.append(f"{kind}: {calls} in a step of rank 0, of {bytes_shown(first.traffic.payload[kind])} together")
    if job.shares == job.ranks > 1:
        found.append(f"with ddp:   {held(first.whole)} on each rank")
        found.append(f"with fsdp:  at most {held(first.shard)} on a rank")
    return found


def _last_batch(job: Job) -> str:
    """What is left over after the whole batches of an epoch, as words."""
    left = job.samples % job.batch
    if not left:
        return ""
    shares = shares_in_words(left, job.ranks, job.shares)
    if left < job.shares == job.ranks:
        first = "for one rank" if left == 1 else f"one for each of {left} ranks"
        shares = f", {first} and none for {job.ranks - left}"
    which = "only" if job.samples < job.batch else "last"
    return f"; the {which} one of an epoch has {left} {'sample' if left == 1 else 'samples'}{shares}"
