"""mode=check: which promises hold for this model and this data, and why not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.distributed.environment import read_rank_info
from lockstep.errors import ConfigError, first_of
from lockstep.modes.base import Mode
from lockstep.text import aligned

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from lockstep.config.record import ConfigRecord
    from lockstep.modes.check_draws import Draws
    from lockstep.modes.check_steps import Facts
    from lockstep.strategies.base import JobSpec

# How far the first steps of one and of two ranks may be apart, relative to the largest value.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
UNKNOWN = "cause not found; perhaps a layer or the loss compares the samples of a batch with each other"
NAMED = 4  # parameters or modules that a line names


class Check(Mode):
    """Takes a few steps on one rank and on two, and prints a table. `lockstep.check_run` does it."""

    name, starts_ranks = "check", True

    def work(self, cfg: "DictConfig", record: "ConfigRecord") -> None:
        from lockstep.check_run import check_run
        from lockstep.config.targets import instantiate_as
        from lockstep.launchers.base import Launcher

        check_run(cfg, instantiate_as(Launcher, cfg.launch, "launch"))

    def validate(self, job: "JobSpec") -> None:
        info = read_rank_info()
        if not info.may_start_ranks:
            raise ConfigError(
                f"mode=check starts its two ranks itself, and {info.started_by} has started this process as one; "
                f"type python src/train.py mode=check"
            )


@dataclass(frozen=True)
class Row:
    """A promise, in the README's words. reasons: why it does not hold, empty if it does. seen: what shows that."""

    promise: str
    reasons: list[str]
    seen: str


@dataclass(frozen=True)
class Options:
    """What the config says, as far as reasons name it."""

    precision: str
    inexact_sync: str | None  # the gradient_sync, if it is not the exact mean
    per_rank: bool  # whether trainer.batch_size_per_rank makes the batch grow with the ranks
    finds_unused: bool  # strategy.find_unused_parameters, or a strategy that does not need it
    micro_batches: bool = False  # whether the strategy cuts a batch into them
    norms_see_parts: bool = True  # whether batch norms that are not synchronised see parts that depend on the ranks


def rows(one: "Facts", two: "Facts", draws: "Draws", apart: dict[str, float], options: Options) -> list[Row]:
    """The promises. one, two: of the worlds of one rank and of two. apart: see `check_steps.differences`."""
    outside = outside_the_seeds(one, two, draws)
    distance = {"loss": relative(one.loss, two.loss)} | apart
    numbers = list[str]()
    if not (one.has_step and two.has_step):
        numbers, distance = ["not checked: there is no first step"], {}
    elif one.not_finite or two.not_finite:
        numbers, distance = ["not checked: the gradients of the first step are not finite"], {}
    else:
        if not max(distance.values()) <= TOLERANCES[options.precision]:
            numbers = causes(two, draws, options) or outside
            numbers = numbers or ([UNKNOWN] if options.inexact_sync is None else [])
        numbers += always(options)
    seen = ", ".join(f"{what} {value:.1e}" for what, value in distance.items())
    unit = " (in float64)" if options.precision == "fp64" else ""
    return [
        Row("the same numbers on any number of ranks, up to rounding", numbers, f"apart by at most: {seen}{unit}"),
        Row("stopped and resumed, the bits of an unbroken run", outside, "samples and outputs are the same twice"),
        Row("your own work fits", fits(one, two, options), f"{one.trained:,} numbers get a finite gradient"),
    ]


def is_unexplained(found: Sequence[Row]) -> bool:
    """Whether the numbers depend on the number of ranks, and nobody knows why."""
    return UNKNOWN in found[0].reasons


def causes(two: "Facts", draws: "Draws", options: Options) -> list[str]:
    """What is known to make the numbers depend on the number of ranks."""
    found = []
    unsynced = two.unsynced if options.norms_see_parts else []
    if unsynced and options.micro_batches:
        norms = first_of(unsynced, NAMED)
        found.append(f"batch norm sees one micro-batch: {norms}; type strategy=ddp, or a model without batch norm")
    elif unsynced:
        found.append(f"batch norm sees a rank's share: {first_of(unsynced, NAMED)}; type sync_bn=auto")
    if two.unused and not options.finds_unused:
        found.append("parameters without a gradient, see below")
    if draws.by_rank and not draws.outputs:
        which = f" ({first_of(draws.dropouts, NAMED)})" if draws.dropouts else ""
        found.append(
            f"the model or the loss draws random numbers{which}, other ones on each rank; "
            f"type strategy=virtual_ranks, or model.dropout=0 if the model has it"
        )
    return found


def always(options: Options) -> list[str]:
    """What makes the numbers depend on the number of ranks, also where the first step does not show it."""
    found = []
    if options.inexact_sync is not None:
        found.append(f"gradient_sync={options.inexact_sync} is not the exact mean; type gradient_sync=auto")
    if options.per_rank:
        found.append("trainer.batch_size_per_rank makes the batch grow with the ranks; type trainer.batch_size=<all>")
    return found


def outside_the_seeds(one: "Facts", two: "Facts", draws: "Draws") -> list[str]:
    """What is another one the second time."""
    found = []
    other_data = two.other_data
    if one.fingerprint != two.fingerprint or (one.first_samples != two.first_samples and not draws.samples):
        other_data = other_data or "training data"
    if other_data:
        found.append(f"the {other_data} is another one at each start: draw it from a seed of its own")
    other = [name for name, value in one.digests.items() if two.digests.get(name, value) != value]
    if other:
        found.append(f"initial weights are not drawn from torch's generator: {first_of(other, NAMED)}")
    if draws.samples:
        found.append("a sample read twice is another one: draw from torch, numpy or random, which are seeded for it")
    if draws.outputs:
        found.append(
            "the model or the loss computed twice gives other values: it draws from numpy, random or a generator of "
            "its own, or keeps what is no saved buffer; draw from torch's generator"
        )
    return found


def fits(one: "Facts", two: "Facts", options: Options) -> list[str]:
    """Why the model and the data cannot be trained as they are."""
    diverged = one.diverged or two.diverged
    found = [diverged] if diverged else []
    not_finite = list(dict.fromkeys([*one.not_finite, *two.not_finite]))
    if not_finite:
        found.append(f"NaN or infinite gradients: {first_of(not_finite, NAMED)}")
    unused = list(dict.fromkeys([*one.unused, *two.unused]))
    if unused and not options.finds_unused:
        found.append(
            f"parameters without a gradient: {first_of(unused, NAMED)}; type strategy.find_unused_parameters=true, or "
            f"freeze=[{','.join(unused[:NAMED])}]"
        )
    return found


def relative(one: float | None, two: float | None) -> float:
    """How far two losses are apart."""
    if one is None or two is None:
        return float("inf")
    return abs(one - two) / max(abs(one), 1e-30)


def table(found: Sequence[Row]) -> list[str]:
    """The lines: a promise, whether it holds, and why not."""
    cells = [("promise", "holds", "because")]
    for row in found:
        first, *others = row.reasons or [row.seen]
        cells.append((row.promise, "no" if row.reasons else "yes", first))
        cells += [("", "", reason) for reason in others]
    return aligned(cells)


def figures(one: "Facts", two: "Facts", ranks: int, shares: int) -> list[str]:
    """The lines about memory, batches, steps and time. ranks: of the run. shares: that they cut a batch into."""
    from lockstep.data.partition import shares_in_words  # imports torch

    epoch, whole = one.steps
    rank = two if two.nbytes else one  # two ranks that read other data take no step
    lines = [
        f"a rank:    {held(rank.nbytes)}; the process took {rank.peak:.0f} MiB at most, with Python and torch",
        f"a batch:   {one.batch} samples{shares_in_words(one.batch, ranks, shares)}",
        f"steps:     {epoch} in an epoch, {whole} in the run",
    ]
    worlds = {"1 rank": one.seconds, f"{two.ranks} ranks": two.seconds}
    times = [f"{seconds * epoch:.3g} s with {name}" for name, seconds in worlds.items() if seconds]
    if times:
        lines.append(f"an epoch:  about {' or '.join(times)} on CPUs of this machine, without its evaluation")
    return lines


def held(nbytes: Mapping[str, int]) -> str:
    """{what: bytes} as words."""
    return ", ".join(f"{bytes_shown(size)} of {what}" for what, size in nbytes.items())


def bytes_shown(size: float) -> str:
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
