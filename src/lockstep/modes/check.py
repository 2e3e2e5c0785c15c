"""mode=check: which promises hold for this model and this data, and why not.

`lockstep.modes.first_steps` is what its ranks do. No torch at the top: `main` imports this.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lockstep.config.schema import with_values
from lockstep.config.targets import instantiate_as
from lockstep.distributed.environment import read_rank_info
from lockstep.errors import EXIT_PROMISES, ConfigError, StoppedEarly, first_of
from lockstep.launchers.base import Launcher
from lockstep.modes.base import Mode
from lockstep.text import aligned

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.launchers.local import SpawnLauncher
    from lockstep.modes.first_steps import Facts
    from lockstep.strategies.base import JobSpec, Strategy

RANKS = 2
FEW_SAMPLES = 4  # of a rank
LITTLE = 0.05  # relative; what rounding makes of ReLUs in deep nets is less
# How far the first steps of one and of two ranks may be apart, relative to the largest value.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
UNKNOWN = "cause not found; perhaps a layer or the loss compares the samples of a batch with each other"
NAMED = 4  # parameters or modules that a line names


class Check(Mode):
    """Takes a few steps on two ranks and on one, and prints a table. Nothing of a run is written.

    The ranks are forks of this process on this machine's CPUs, whatever `launch` says.
    """

    name, starts_ranks = "check", True

    def validate(self, job: "JobSpec") -> None:
        info = read_rank_info()
        if not info.may_start_ranks:
            raise ConfigError(
                f"mode=check starts its two ranks itself, and {info.started_by} has started this process as one; "
                f"type python src/train.py mode=check"
            )

    def work(self, cfg: DictConfig, record: "ConfigRecord") -> None:
        """Ends the process with EXIT_PROMISES if a promise does not hold."""
        from multiprocessing.util import get_temp_dir

        import torch

        from lockstep.preflight import as_taken, check_batch_size, check_model, check_options, prepare_data

        if cfg.resume is not None:
            raise ConfigError(
                f"mode=check looks at what a command would train, and reads no run; leave resume={cfg.resume} out and "
                f"type the words of that run, which are in its .hydra/overrides.yaml"
            )
        folder = Path(get_temp_dir())  # it goes with this process, also at Ctrl-C
        if folder not in Path(cfg.run_dir).parents:  # `mode: check` in a file
            _remove_new_folder(Path(cfg.run_dir))
        cfg = as_taken(cfg)
        strategy, ranks = check_options(cfg, instantiate_as(Launcher, cfg.launch, "launch"))
        shares, options = strategy.data_parallel_size(ranks), options_of(cfg, strategy)
        changes: dict[str, Any] = {"backend.name": "gloo", "trainer.compile": False, "profiler.enabled": False}
        changes |= {"trainer.batch_size": check_batch_size(cfg, shares), "trainer.batch_size_per_rank": None}
        replicas = cfg.strategy.get("replicas", 1)
        if replicas > 1:  # each has two ranks or more
            changes["strategy.replicas"] = 1
        small = with_values(cfg, changes)
        try:
            for count in (1, RANKS):
                check_options(small, _forks(count))
        except ConfigError as error:
            raise ConfigError(f"mode=check runs on 1 and on {RANKS} ranks: {error}") from None
        prepare_data(small)
        check_model(small, strategy, RANKS)
        torch.set_num_threads(1)  # this process compares tensors and forks again: it must start no threads
        one, two, apart = _compare_worlds(small, folder, timed=True)
        resumed = _resume(small, folder)
        found = rows(one, two, apart, options)
        found[1] = replace(found[1], reasons=[*found[1].reasons, *what_a_resume_changes(resumed)])
        # In float32 a rounding error may turn a ReLU off: only float64 tells.
        if UNKNOWN in found[0].reasons and options.precision != "fp64":
            smallest = FEW_SAMPLES * max(RANKS, strategy.data_parallel_size(RANKS))
            found[0] = _in_float64(small, folder, found[0], options, max(apart.values(), default=0.0), smallest)
        lines = figures(one, two, ranks, shares)
        if replicas > 1:
            lines.append(f"replicas:  the two ranks were checked with strategy.replicas=1, not {replicas}")
        print("\n".join([*table(found), "", *lines]), flush=True)
        if any(row.reasons for row in found):
            raise StoppedEarly("a promise does not hold, as the table says", EXIT_PROMISES)


def _remove_new_folder(run_dir: Path) -> None:
    """Remove the run folder that Hydra has made, if it is empty, with those that Hydra has made for it here."""
    here = Path.cwd()
    with suppress(OSError):  # it holds something, or is gone
        run_dir.rmdir()
        for parent in run_dir.parents:
            if here not in parent.parents:
                break
            parent.rmdir()


def _forks(ranks: int) -> "SpawnLauncher":
    """Starts a world as forks of this process."""
    from lockstep.launchers.local import SpawnLauncher

    launcher = SpawnLauncher("fork", ranks, 1, 0, "127.0.0.1", 0)
    launcher.prepare("lockstep.rank_imports")
    return launcher


def _compare_worlds(cfg: DictConfig, folder: Path, timed: bool) -> tuple["Facts", "Facts", dict[str, float]]:
    """What one rank finds, what two find, and how far their first steps are apart. timed: see `Variant`."""
    import torch

    from lockstep.modes.first_steps import Variant, differences, find_facts

    two = _forks(RANKS).launch(find_facts, cfg, folder, Variant(timed))
    one = _forks(1).launch(find_facts, cfg, folder, Variant(timed))
    if not (one.has_step and two.has_step):
        return one, two, {}
    return one, two, differences(*[torch.load(folder / f"{number}.pt", weights_only=True) for number in (1, RANKS)])


def _resume(cfg: DictConfig, folder: Path) -> "Facts | None":
    """What one rank finds that goes on from what another one has saved; None if that one has taken no two steps."""
    from lockstep.modes.first_steps import SECOND, Variant, find_facts

    return _forks(1).launch(find_facts, cfg, folder, Variant(resumes=True)) if (folder / SECOND).exists() else None


def _in_float64(cfg: DictConfig, folder: Path, row: "Row", options: "Options", apart: float, smallest: int) -> "Row":
    """The first row, computed again in float64, which tells rounding from a cause; `row` with a reason if it fails.

    apart: how far the worlds were apart. If that was little, a few samples tell as much, and convolutions take ten
    times as long in float64.
    smallest: samples of a micro-batch that are enough.
    """
    changes: dict[str, Any] = {"trainer.precision": "fp64"}
    if apart < LITTLE:
        few = smallest * cfg.trainer.gradient_accumulation_steps
        changes["trainer.batch_size"] = min(cfg.trainer.batch_size, few)
    one, two, distance = _compare_worlds(with_values(cfg, changes), folder, timed=False)
    failed = one.failed or two.failed
    if failed is not None:
        reason = f"float64 would tell whether this is rounding alone, but the step fails there ({failed})"
        return replace(row, reasons=[*row.reasons, reason])
    return rows(one, two, distance, replace(options, precision="fp64"))[0]


# Reasons.


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
    norms_see: str = "a rank's share"  # what a batch norm sees that is not synchronised, see `Strategy.batch_norm_sees`
    norms_advice: str = "sync_bn=auto"


def options_of(cfg: DictConfig, strategy: "Strategy") -> Options:
    from lockstep.strategies.gradient_sync import GradientSync

    sync = instantiate_as(GradientSync, cfg.gradient_sync, "gradient_sync")
    grows = strategy.data_parallel_size(1) != strategy.data_parallel_size(RANKS)
    return Options(
        precision=cfg.trainer.precision,
        inexact_sync=None if sync.is_exact else sync.name,
        per_rank=cfg.trainer.batch_size_per_rank is not None and grows,
        finds_unused=bool(cfg.strategy.get("find_unused_parameters", True)),
        norms_see=strategy.batch_norm_sees(),
        norms_advice="sync_bn=auto" if strategy.supports_sync_bn else "strategy=ddp, or a model without batch norm",
    )


def rows(one: "Facts", two: "Facts", apart: dict[str, float], options: Options) -> list[Row]:
    """The promises. one, two: of the worlds of one rank and of two. apart: see `first_steps.differences`."""
    changing = what_changes(one, two)
    far = float("inf") if one.loss is None or two.loss is None else abs(one.loss - two.loss) / max(abs(one.loss), 1e-30)
    distance = {"loss": far} | apart
    numbers = list[str]()
    if two.parting:
        numbers, distance = [two.parting], {}
    elif not (one.has_step and two.has_step):
        numbers, distance = ["not checked: there is no first step"], {}
    elif one.not_finite or two.not_finite:
        numbers, distance = ["not checked: the gradients of the first step are not finite"], {}
    else:
        if not max(distance.values()) <= TOLERANCES[options.precision]:
            numbers = known_causes(one, two, options) or changing
            numbers = numbers or ([UNKNOWN] if options.inexact_sync is None else [])
        # What the first step may not show.
        for name in dict.fromkeys([*one.no_sums, *two.no_sums]):
            numbers.append(f"the {name} of the task does not add up over the samples of a batch; return a sum")
        if options.inexact_sync is not None:
            numbers.append(f"gradient_sync={options.inexact_sync} is not the exact mean; type gradient_sync=auto")
        if options.per_rank:
            numbers.append(
                "trainer.batch_size_per_rank makes the batch grow with the ranks; type trainer.batch_size=<all>"
            )
    seen = ", ".join(f"{what} {value:.1e}" for what, value in distance.items())
    unit = " (in float64)" if options.precision == "fp64" else ""
    return [
        Row("the same numbers on any number of ranks, up to rounding", numbers, f"apart by at most: {seen}{unit}"),
        Row("stopped and resumed, the bits of an unbroken run", changing, "samples and outputs are the same twice"),
        Row("your own work fits", what_fails(one, two, options), f"{one.trained:,} numbers get a finite gradient"),
    ]


def known_causes(one: "Facts", two: "Facts", options: Options) -> list[str]:
    """What is known to make the numbers depend on the number of ranks."""
    causes = []
    if two.unsynced and options.norms_see:
        norms = first_of(two.unsynced, NAMED)
        causes.append(f"batch norm sees {options.norms_see}: {norms}; type {options.norms_advice}")
    if two.buffers:
        causes.append(
            f"a rank changes {first_of(two.buffers, NAMED)} by its own share, and the ranks' mean is not what one rank "
            f"has; gather the samples of all ranks in the module"
        )
    if two.unused and not options.finds_unused:
        causes.append("parameters without a gradient, see below")
    if one.seed_counts and not one.outputs_drawn:
        which = f" ({first_of(one.dropouts, NAMED)})" if one.dropouts else ""
        causes.append(
            f"the model or the loss draws random numbers{which}, other ones on each rank; "
            f"type strategy=virtual_ranks, or model.dropout=0 if the model has it"
        )
    return causes


def what_changes(one: "Facts", two: "Facts") -> list[str]:
    """What is another one the second time, whatever the seed is."""
    reasons = []
    other_data = two.other_data
    if one.fingerprint != two.fingerprint or (one.first_samples != two.first_samples and not one.samples_drawn):
        other_data = other_data or "training data"
    if other_data:
        reasons.append(f"the {other_data} is another one at each start: draw it from a seed of its own")
    other = [name for name, value in one.digests.items() if two.digests.get(name, value) != value]
    if other:
        reasons.append(f"initial weights are not drawn from torch's generator: {first_of(other, NAMED)}")
    if one.samples_drawn:
        reasons.append("a sample read twice is another one: draw from torch, numpy or random, which are seeded for it")
    if one.outputs_drawn:
        reasons.append(
            "the model or the loss computed twice gives other values: it draws from numpy, random or a generator of "
            "its own, or keeps what is no saved buffer; draw from torch's generator"
        )
    return reasons


def what_a_resume_changes(resumed: "Facts | None") -> list[str]:
    """Why the step after a resume is another one than that of the run which went on."""
    if resumed is None:
        return []
    if resumed.resume_failed or resumed.failed:
        reason = resumed.resume_failed or resumed.failed
        return [
            f"what is saved after a step cannot be loaded by a new model ({reason}): register each buffer in __init__, "
            f"in the shape that it keeps"
        ]
    if resumed.resumed.get("gradients"):
        return [
            f"after a resume the gradients of {first_of(resumed.resumed['gradients'], NAMED)} are others: the model "
            f"or the loss keeps what no snapshot has, such as a count in a plain attribute; make it a buffer, or "
            f"return it in get_extra_state"
        ]
    if resumed.resumed.get("weights"):
        return [
            f"after a resume {first_of(resumed.resumed['weights'], NAMED)} is updated otherwise by the same gradients: "
            f"the optimizer keeps what its state_dict does not give back; keep it in self.state[parameter]"
        ]
    return []


def what_fails(one: "Facts", two: "Facts", options: Options) -> list[str]:
    """Why the model and the data cannot be trained as they are."""
    reasons = list(filter(None, [one.diverged or two.diverged, one.unowned or two.unowned]))
    not_finite = list(dict.fromkeys([*one.not_finite, *two.not_finite]))
    if not_finite:
        reasons.append(f"NaN or infinite gradients: {first_of(not_finite, NAMED)}")
    unused = list(dict.fromkeys([*one.unused, *two.unused]))
    if unused and not options.finds_unused:
        reasons.append(
            f"parameters without a gradient: {first_of(unused, NAMED)}; type strategy.find_unused_parameters=true, or "
            f"freeze=[{','.join(unused[:NAMED])}]"
        )
    return reasons


# The screen.


def table(found: Sequence[Row]) -> list[str]:
    """The lines: a promise, whether it holds, and why not."""
    cells = [("promise", "holds", "because")]
    for row in found:
        first, *others = row.reasons or [row.seen]
        cells.append((row.promise, "no" if row.reasons else "yes", first))
        cells += [("", "", reason) for reason in others]
    return aligned(cells)


def figures(one: "Facts", two: "Facts", ranks: int, shares: int) -> list[str]:
    """The lines about memory, batches, steps and time, and notes. ranks: of the run. shares: of a batch."""
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
    return [*lines, *one.notes]


def held(nbytes: Mapping[str, int]) -> str:
    """{what: bytes} as words."""
    return ", ".join(f"{bytes_shown(size)} of {what}" for what, size in nbytes.items())


def bytes_shown(size: float) -> str:
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
