"""mode=check: which promises hold for this model and this data, and why not.

It takes the first steps of the run in several ways, the variants below, and compares what each stage of a step has
computed. The first stage that parts tells the cause. `lockstep.modes.first_steps` is what the ranks do. No torch at the
top: `main` imports this.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
RESULTS = ("loss", "gradients", "weights")  # the stages that decide; those before them explain

OF_RANKS = {
    "start": "initial weights are not drawn from torch's generator: {names}",
    "samples": "a sample is another one on another rank: draw from torch, numpy or random, which are seeded for it",
    "layers": "cause not found; {first} is the first layer with other outputs for the same samples: perhaps it "
    "compares the samples of a batch with each other, or draws from a generator of its own",
    "loss": "cause not found; the loss is another one for the same outputs: perhaps the task compares the samples of a "
    "batch with each other, or draws",
    "gradients": "cause not found; the gradients of {names} are others for the same loss: perhaps a layer or the loss "
    "compares the samples of a batch with each other",
    "weights": "the same gradients change {names} otherwise: it depends on the share of the batch that a rank has",
}
REREAD = (
    "a sample read twice is another one: draw from torch, numpy or random, which are seeded for it, and change a copy "
    "of what the data set keeps"
)
HIDDEN = (
    "the model or the loss keeps what no snapshot has, such as a count in a plain attribute, or draws from a "
    "generator of its own; make it a buffer, return it in get_extra_state, or draw from torch's generator"
)
OF_RESUME = {
    "samples": REREAD,
    "layers": f"after a resume the outputs of {{first}} are others: {HIDDEN}",
    "gradients": f"after a resume the gradients of {{names}} are others: {HIDDEN}",
    "weights": "after a resume {names} is updated otherwise by the same gradients: the optimizer keeps what its "
    "state_dict does not give back; keep it in self.state[parameter]",
}


@dataclass(frozen=True)
class Variant:
    """A way to take the first steps.

    ranks: how many take them.
    precision: another one than the command's. Some models cannot compute in it.
    step: the step that is compared with that of one rank. The second one is taken after a resume.
    causes: {a stage: why a variant parts there first from one rank}, of the stages that are compared. {names} are those
        that part, {first} the first of them.
    """

    name: str
    ranks: int
    precision: str | None = None
    step: int = 1
    causes: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether it takes the steps of the command."""
        return self.precision is None and self.step == 1


ONE = Variant("one", 1)
TWO = Variant("two", RANKS, causes=OF_RANKS)
RESUMED = Variant("resumed", 1, step=2, causes=OF_RESUME)
ONE_FINE = Variant("fine-one", 1, precision="fp64")
TWO_FINE = Variant("fine-two", RANKS, precision="fp64", causes=OF_RANKS)


@dataclass(frozen=True)
class Parting:
    """How far a variant is apart from one rank. apart: at most, in each of `RESULTS`; empty: there was no step.

    stage: the first one that parts. cause: why; empty: the results are near enough.
    """

    apart: Mapping[str, float]
    stage: str = ""
    cause: str = ""


def parting(variant: Variant, distances: Mapping[str, Mapping[str, float]], tolerance: float) -> Parting:
    """distances: see `first_steps.differences`. tolerance: of each of them."""
    apart = {stage: max(distances[stage].values(), default=0.0) for stage in RESULTS if stage in distances}
    if any(not apart[stage] <= tolerance for stage in variant.causes if stage in apart):
        for stage, cause in variant.causes.items():
            names = [name for name, distance in distances[stage].items() if not distance <= tolerance]
            if names:
                return Parting(apart, stage, cause.format(first=names[0], names=first_of(names)))
    return Parting(apart)


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
        shares, always = strategy.data_parallel_size(ranks), known_before(cfg, strategy)
        changes: dict[str, Any] = {"backend.name": "gloo", "profiler.enabled": False}
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
        few = FEW_SAMPLES * max(RANKS, strategy.data_parallel_size(RANKS)) * cfg.trainer.gradient_accumulation_steps
        rows, one, two = checked(small, folder, few, always)
        lines = figures(one, two, ranks, shares)
        if replicas > 1:
            lines.append(f"replicas:  the two ranks were checked with strategy.replicas=1, not {replicas}")
        print("\n".join([*table(rows), "", *lines]), flush=True)
        if any(row.reasons for row in rows):
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


def known_before(cfg: DictConfig, strategy: "Strategy") -> list[str]:
    """Why the numbers depend on the number of ranks, whatever the first step shows."""
    from lockstep.strategies.gradient_sync import GradientSync

    reasons = []
    sync = instantiate_as(GradientSync, cfg.gradient_sync, "gradient_sync")
    if not sync.is_exact:
        reasons.append(f"gradient_sync={sync.name} is not the exact mean; type gradient_sync=auto")
    if cfg.trainer.batch_size_per_rank is not None and strategy.data_parallel_size(RANKS) > 1:
        reasons.append("trainer.batch_size_per_rank makes the batch grow with the ranks; type trainer.batch_size=<all>")
    return reasons


@dataclass(frozen=True)
class Row:
    """A promise, in the README's words. reasons: why it does not hold, empty if it does. seen: what shows that."""

    promise: str
    reasons: list[str]
    seen: str


def checked(cfg: DictConfig, folder: Path, few: int, always: Sequence[str]) -> "tuple[list[Row], Facts, Facts]":
    """The promises, and what one rank and two have found.

    folder: of what worlds leave for each other.
    few: samples of a batch that are enough for a look in float64.
    always: reasons why the numbers depend on the number of ranks.
    """
    import torch

    from lockstep.modes.first_steps import compare, find_facts

    torch.set_num_threads(1)  # this process compares tensors and forks again: it must start no threads

    def take(variant: Variant, **changes: Any) -> "Facts":
        changes |= {"trainer.precision": variant.precision or cfg.trainer.precision, "trainer.compile": False}
        facts: Facts = _forks(variant.ranks).launch(find_facts, with_values(cfg, changes), folder, variant)
        return facts

    def same_numbers(one: "Facts", two: "Facts", numbers: Parting, precision: str) -> Row:
        unchecked = two.unchecked or one.unchecked
        known = [unchecked] if unchecked else [*one.numbers, *two.numbers, *always]
        if numbers.cause and not unchecked:
            known = [*two.likely, *known] or [numbers.cause]
        apart = ", ".join(f"{what} {value:.1e}" for what, value in numbers.apart.items())
        unit = " (in float64)" if precision == "fp64" else ""
        return Row("the same numbers on any number of ranks, up to rounding", known, f"apart by at most: {apart}{unit}")

    two, one = take(TWO), take(ONE)
    precision = cfg.trainer.precision
    tolerance = max(TOLERANCES[precision], TOLERANCES[one.coarsest])
    numbers = parting(TWO, compare(folder, ONE, TWO), tolerance)
    if cfg.trainer.compile and one.draws:
        always = [*always, "compiled, dropout and noise are drawn for a rank; type trainer.compile=false"]
    rows = [same_numbers(one, two, numbers, precision)]

    # In float32 a rounding error may turn a ReLU off: only float64 tells.
    if rows[0].reasons == [numbers.cause] and precision != "fp64" and numbers.stage not in ("start", "samples"):
        # If they were little apart, a few samples tell as much: convolutions take ten times as long in float64.
        is_little = max(numbers.apart.values()) < LITTLE
        batch = {"trainer.batch_size": min(cfg.trainer.batch_size, few)} if is_little else {}
        fine = take(ONE_FINE, **batch), take(TWO_FINE, **batch)
        failed = fine[0].failed or fine[1].failed
        if failed:
            rows[0].reasons.append(
                f"float64 would tell whether this is rounding alone, but the step fails there ({failed})"
            )
        else:
            exact = parting(TWO_FINE, compare(folder, ONE_FINE, TWO_FINE), TOLERANCES[fine[0].coarsest])
            rows[0] = same_numbers(*fine, exact, "fp64")

    reasons, resume = [*two.resume, *one.resume], Parting({})
    if one.fingerprint != two.fingerprint and not reasons:
        reasons.append("the training data is another one at each start: draw it from a seed of its own")
    if numbers.stage == "start":
        reasons.append(numbers.cause)
    if not reasons and list(folder.glob(f"{ONE.name}-{RESUMED.step}-*")):
        failed = take(RESUMED).failed
        resume = parting(RESUMED, compare(folder, ONE, RESUMED), 0.0)
        if failed:
            reasons.append(
                f"what is saved after a step cannot be loaded by a new model ({failed}): register each buffer in "
                f"__init__, in the shape that it keeps"
            )
        elif resume.cause:
            reasons.append(resume.cause)
    seen = "one rank that resumes takes the same second step" if resume.apart else "samples are the same twice"
    rows.append(Row("stopped and resumed, the bits of an unbroken run", reasons, seen))
    rows.append(Row("your own work fits", one.fits or two.fits, f"{one.trained:,} numbers get a finite gradient"))
    return [replace(row, reasons=list(dict.fromkeys(row.reasons))) for row in rows], one, two


# The screen.


def table(rows: Sequence[Row]) -> list[str]:
    """The lines: a promise, whether it holds, and why not."""
    cells = [("promise", "holds", "because")]
    for row in rows:
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
    worlds = {"1 rank": one.seconds, f"{RANKS} ranks": two.seconds}
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
