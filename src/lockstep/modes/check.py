"""mode=check: which promises hold for this model and this data, and why not.

It takes the first steps of the run on one rank, on two, and after a resume, with few samples and in float64, where a
rounding error cannot turn a ReLU off. Then it compares what each stage of a step has computed: the first stage that
parts tells the cause. `lockstep.modes.first_steps` is what the ranks do. No torch at the top: `main` imports this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.distributed.environment import read_rank_info
from lockstep.errors import EXIT_PROMISES, ConfigError, StoppedEarly, first_of
from lockstep.modes.base import Mode
from lockstep.text import aligned

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.config.schema import RunConfig
    from lockstep.launchers.local import SpawnLauncher
    from lockstep.modes.first_steps import Facts
    from lockstep.preflight import Parts
    from lockstep.strategies.base import JobSpec

RANKS = 2
FEW_SAMPLES = 7  # of a rank; seldom another size of a tensor, which draws could be taken for
# How far the first steps of one and of two ranks may be apart, relative to the largest value. Also in float64 some nets
# compute a part in float32.
TOLERANCE, TOLERANCE_OF_HALVES = 1e-3, 0.1
RESULTS = ("loss", "gradients", "weights")  # the stages that decide; those before them explain

OF_RANKS = {
    "start": "initial weights are not drawn from torch's generator: {names}",
    "samples": "a sample is another one on another rank: draw from torch, numpy or random, which are seeded for it",
    "layers": "cause not found; {first} is the first layer with other outputs for the same samples: perhaps it "
    "compares the samples of a batch with each other, or draws from a generator of its own",
    "loss": "cause not found; the loss is another one for the same outputs: perhaps the task compares the samples of a "
    "batch with each other, or draws",
    "gradients": "cause not found; the gradients of {names} are others for the same loss: perhaps a layer or the loss "
    "compares the samples of a batch with each other, or a hook changes a part of a gradient",
    "weights": "the same gradients change {names} otherwise: it depends on the share of the batch that a rank has",
}
REREAD = (
    "a sample read twice is another one: draw from torch, numpy or random, which are seeded for it, and change a copy "
    "of what the data set keeps"
)
KEPT = (
    "a sample depends on what was read before, such as one that is kept with its random transforms: keep what was "
    "read, and change a copy each time"
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
    steps: those that are kept, to be compared with those of `ONE`. The second one alone is taken after a resume.
    causes: {a stage: why a variant parts there first from one rank}, of the stages that are compared. {names} are those
        that part, {first} the first of them.
    """

    name: str
    ranks: int
    steps: tuple[int, ...]
    causes: Mapping[str, str] = field(default_factory=dict)


ONE = Variant("one", 1, (1, 2))
TWO = Variant("two", RANKS, (1,), OF_RANKS)
RESUMED = Variant("resumed", 1, (2,), OF_RESUME)


def parting(
    variant: Variant, distances: Mapping[str, Mapping[str, float]], tolerance: float
) -> tuple[str, str] | tuple[None, None]:
    """(the first stage in which a variant is too far apart from one rank, why), or None if its results are near.

    distances: see `first_steps.differences`.
    """
    far = {
        stage: [name for name, distance in distances.get(stage, {}).items() if not distance <= tolerance]
        for stage in variant.causes
    }
    if any(far.get(stage) for stage in RESULTS):
        for stage, names in far.items():
            if names:
                return stage, variant.causes[stage].format(first=names[0], names=first_of(names))
    return None, None


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

    def work(self, config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> None:
        """Ends the process with EXIT_PROMISES if a promise does not hold."""
        from multiprocessing.util import get_temp_dir

        from lockstep.data.build import prepare_first
        from lockstep.preflight import build_parts
        from lockstep.preflight_rules import check_batch_size

        ranks, _ = parts.launcher.num_ranks()
        changes: dict[str, Any] = {"backend.name": "gloo", "profiler.enabled": False}
        batch_size = check_batch_size(config, parts.strategy.data_parallel_size(ranks))
        changes |= {"trainer.batch_size": batch_size, "trainer.batch_size_per_rank": None}
        notes = []
        replicas = config.strategy.get("replicas", 1)
        if replicas > 1:  # each has two ranks or more
            changes["strategy.replicas"] = 1
            notes.append(f"the two ranks were checked with strategy.replicas=1, not {replicas}")
        here = config.changed(changes)
        try:
            of_ranks = {count: build_parts(here, _forks(count), self) for count in (1, RANKS)}
        except ConfigError as error:
            raise ConfigError(f"mode=check runs on 1 and on {RANKS} ranks: {error}") from None
        prepare_first(here)
        shares = of_ranks[RANKS].strategy.data_parallel_size(RANKS)
        few = FEW_SAMPLES * max(RANKS, shares) * here.trainer.gradient_accumulation_steps
        # A folder that goes with this process, also at Ctrl-C.
        rows, found = checked(here, Path(get_temp_dir()), few, known_before(config, parts), of_ranks)
        notes += found
        print("\n".join([*table(rows), *([""] if notes else []), *notes]), flush=True)
        if any(row.reasons for row in rows):
            raise StoppedEarly("a promise does not hold, as the table says", EXIT_PROMISES)


def _forks(ranks: int) -> "SpawnLauncher":
    """Starts a world as forks of this process."""
    from lockstep.launchers.local import SpawnLauncher

    launcher = SpawnLauncher("fork", ranks, 1, 0, "127.0.0.1", 0)
    launcher.prepare("lockstep.launchers.rank_imports")
    return launcher


def known_before(config: "RunConfig", parts: "Parts") -> list[str]:
    """Why the numbers depend on the number of ranks, whatever the first step shows."""
    reasons, sync = [], parts.gradient_sync
    if not sync.is_exact:
        reasons.append(f"gradient_sync={sync.name} is not the exact mean; type gradient_sync=auto")
    if config.trainer.batch_size_per_rank is not None and parts.strategy.data_parallel_size(RANKS) > 1:
        reasons.append("trainer.batch_size_per_rank makes the batch grow with the ranks; type trainer.batch_size=<all>")
    return reasons


@dataclass(frozen=True)
class Row:
    """A promise, in the README's words. reasons: why it does not hold, empty if it does. seen: what shows that."""

    promise: str
    reasons: list[str]
    seen: str


def checked(
    config: "RunConfig", folder: Path, few: int, known: Sequence[str], of_ranks: Mapping[int, "Parts"]
) -> tuple[list[Row], list[str]]:
    """The promises, and lines about what breaks none.

    folder: of what worlds leave for each other.
    few: samples of a batch that are enough in float64.
    known: reasons why the numbers depend on the number of ranks, whatever the first step shows.
    of_ranks: the parts for a number of ranks.
    """
    import torch

    from lockstep.modes.first_steps import compare, find_facts

    torch.set_num_threads(1)  # this process compares tensors and forks again: it must start no threads

    def take(variant: Variant, may_fail: bool = False) -> "Facts":
        facts: Facts = _forks(variant.ranks).launch(
            find_facts, used, of_ranks[variant.ranks], folder, variant, may_fail
        )
        return facts

    plain = config.changed({"trainer.compile": False})
    batch_size = min(config.trainer.batch_size, few)
    used = plain.changed({"trainer.precision": "fp64", "trainer.batch_size": batch_size})
    one, why_not = take(ONE, may_fail=True), ""
    if one.failed:
        why_not, used = one.failed, plain
        one = take(ONE)
    two = take(TWO)

    precision = used.trainer.precision
    has_halves = precision in ("bf16", "fp16") or one.coarsest == "bf16"
    distances = compare(folder, ONE, TWO)
    stage, cause = parting(TWO, distances, TOLERANCE_OF_HALVES if has_halves else TOLERANCE)
    unchecked = two.unchecked or one.unchecked
    numbers = [unchecked] if unchecked else [*one.numbers, *two.numbers, *known]
    if config.trainer.compile and one.draws and not unchecked:
        numbers.append("compiled, dropout and noise are drawn for a rank; type trainer.compile=false")
    if cause and not unchecked:
        numbers = [*two.likely, *numbers] or [cause]
        if why_not and numbers == [cause] and stage not in ("start", "samples"):
            numbers.append(f"float64 would tell whether this is rounding alone, but the step fails there ({why_not})")
    largest = {stage: max(distances.get(stage, {}).values(), default=0.0) for stage in RESULTS}
    apart = ", ".join(f"{stage} {distance:.1e}" for stage, distance in largest.items())
    seen = f"apart by at most: {apart} (in {precision})"

    resume = [*two.resume, *one.resume]
    if one.fingerprint != two.fingerprint and not resume:
        resume.append("the training data is another one at each start: draw it from a seed of its own")
    if one.second_epoch != two.second_epoch and not resume:
        resume.append(KEPT)
    if stage == "start":
        resume.append(str(cause))
    resumed_distances: Mapping[str, Mapping[str, float]] = {}
    if not resume and not one.unchecked:
        resumed = take(RESUMED, may_fail=True)
        resumed_distances = compare(folder, ONE, RESUMED)
        _, cause = parting(RESUMED, resumed_distances, 0.0)
        if resumed.failed:
            resume.append(
                f"what is saved after a step cannot be loaded by a new model ({resumed.failed}): register each buffer "
                f"in __init__, in the shape that it keeps"
            )
        elif cause:
            resume.append(cause)
    resumes = "one rank that resumes takes the same second step" if resumed_distances else "samples are the same twice"
    rows = [
        Row("the same numbers on any number of ranks, up to rounding", numbers, seen),
        Row("stopped and resumed, the bits of an unbroken run", resume, resumes),
        Row("your own work fits", one.fits or two.fits, f"{one.trained:,} numbers get a finite gradient"),
    ]
    return [replace(row, reasons=list(dict.fromkeys(row.reasons))) for row in rows], one.notes


def table(rows: Sequence[Row]) -> list[str]:
    """The lines: a promise, whether it holds, and why not."""
    cells = [("promise", "holds", "because")]
    for row in rows:
        first, *others = row.reasons or [row.seen]
        cells.append((row.promise, "no" if row.reasons else "yes", first))
        cells += [("", "", reason) for reason in others]
    return aligned(cells)
