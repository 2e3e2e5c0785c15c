"""mode=check: which promises hold for a job, and where they break.

It trains the job as typed for a few steps, in float64 and on few samples, in ways that must give the same numbers. The
first stage that parts tells the cause. `lockstep.modes.recorder` is what a rank does. No torch at the top: `main`
imports this. All ranks are forks of one process: what a module draws when it is imported is not seen, either.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Ge

from lockstep.config.check import instantiate_as
from lockstep.errors import EXIT_FAILED, ConfigError, RankFailed, StoppedEarly, first_of
from lockstep.failures.explain import known_meaning
from lockstep.modes.base import Mode
from lockstep.text import aligned

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.config.schema import RunConfig
    from lockstep.preflight import Parts

STAGES = ("start", "samples", "layers", "loss", "gradients", "weights", "evaluation")
RESULTS = STAGES[3:]  # which decide whether runs part; the others say why
FEW = 7  # samples of a rank's batch, seldom another size of a tensor
FLOOR = 1e-3  # of the largest value of a stage: what differences are relative to, at least
TOLERANCES = {64: 1e-6, 32: 1e-3, 16: 0.1}  # relative, by the fewest bits in which a net computes
PROMISES = {
    "again": "the same run, typed again",
    "two": "the same numbers on {} ranks",
    "cut": "the same numbers in micro-batches",
    "resumed": "stopped and resumed, the same bits",
    "compiled": "compiled, the same numbers",
}
CAUSES = {  # of what is named before it; by a way and a stage, by a stage, or by a way
    "start": "other first weights; draw them from torch's generator",
    "samples": "other samples, or what was read before has changed them; draw from torch, numpy or random, which are "
    "seeded for each, and change a copy of what the data set keeps",
    "two": "it depends on a rank's share of the batch, or is drawn for all of it; compute it of the samples of all "
    "ranks, draw by sample, return a value for each sample, or type sync_bn=auto strategy=ddp",
    "two gradients": "a hook or a backward pass is not linear, or compares samples; change the gradient of the whole "
    "batch, in the optimizer, or type gradient_sync=auto",
    "cut": "changed in each pass, or by comparing samples; type trainer.gradient_accumulation_steps=1",
    "resumed": "the model, the loss, a hook or the optimizer keeps what no snapshot has, or draws by itself; make it a "
    "buffer, return it in get_extra_state, or keep it in optimizer.state[parameter], and draw from torch's generator",
    "again": "something asks the clock, or a generator that no seed reaches; draw from torch's generator",
    "evaluated": "an evaluation changes what the training goes on with; change it while self.training alone",
    "compiled": "a compiled net draws dropout for a rank, or is another one; type trainer.compile=false",
}
UNHELD = "put layers into torch.nn.ModuleList, tensors into torch.nn.ParameterList, and those of a loss into the model"


class Ended(NamedTuple):
    """A run: its trace, as `recorder.Trace`, and what has ended it too early."""

    trace: dict[Any, Any]
    error: Exception | None = None
    failed: str = ""

    def of(self, stage: str) -> list[tuple[str, int, float, float]]:
        """[(name, number, sums)] of all steps."""
        return [(name, *value) for (_, of, name), value in self.trace.items() if of == stage]


class Check(Mode):
    """Takes a few steps in several ways, and prints a table. Nothing of a run is written.

    The ranks are forks of this process on this machine's CPUs, whatever `launch` says.
    steps: of each run. ranks: that are compared with one. changed: {section: {key: what is not as typed}}.
    """

    name, starts_ranks = "check", True

    def __init__(
        self, steps: Annotated[int, Ge(4)], ranks: Annotated[int, Ge(2)], changed: dict[str, dict[str, Any]]
    ) -> None:
        self.steps, self.ranks = steps, ranks
        self.changed = {f"{section}.{key}": value for section, keys in changed.items() for key, value in keys.items()}

    def work(self, config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> None:
        """Ends the process with EXIT_FAILED if a promise does not hold."""
        from multiprocessing.util import get_temp_dir  # it goes with this process, also at Ctrl-C

        import torch

        from lockstep.data.build import prepare_first
        from lockstep.strategies.base import Strategy

        torch.set_num_threads(1)  # this process forks again: it must start no threads
        prepare_first(config)
        shares, fails = instantiate_as(Strategy, config.strategy, "strategy").data_share_of(self.ranks), ""
        for precision in dict.fromkeys(["fp64", config.trainer.precision]):  # some nets cannot compute in float64
            job = config.changed({"trainer.precision": precision})
            ways = self.ways(job, shares, Path(get_temp_dir(), precision))
            runs = {"one": ended(ways.pop("one"), record, 1)}
            if not runs["one"].error:
                runs |= {name: ended(way, record, self.ranks if name == "two" else 1) for name, way in ways.items()}
                break
            fails = runs["one"].failed
        rows = self.rows(job, runs)
        print("\n".join(aligned([("promise", "holds", "because"), *rows])), flush=True)
        if fails and not runs["one"].error:
            print(f"rounding in {precision} hides small faults; fp64 fails: {fails}", flush=True)
        if any(holds == "no" for _, holds, _ in rows):
            raise StoppedEarly("a promise does not hold, as the table says", EXIT_FAILED)

    def ways(self, job: "RunConfig", shares: int, folder: Path) -> "dict[str, RunConfig]":
        """The configs of the runs. shares: in which the ranks that are compared with one cut a batch."""
        data, micro_batches = job.loader, job.trainer.gradient_accumulation_steps
        size = min(job.trainer.batch_size, FEW * max(2, shares) * micro_batches)
        fold = None if data.folds is None else [data.fold, data.folds]
        hold = [data.validation, fold, data.split_seed, data.groups] if job.holds_out else None
        few = {key: job.dataset.get(key) for key in ("shape", "classes", "mean", "std")} | {"source": job.dataset}
        few |= {"_target_": "lockstep.modes.recorder.Few", "samples": 5 * size // 2, "hold": hold}
        every = self.changed | {"dataset": few, "trainer.batch_size": size, "logger": {}}
        every |= {"trainer.epochs": self.steps, "trainer.max_steps": self.steps}
        every["callbacks"] = [*job.callbacks, {"_target_": "lockstep.modes.recorder.Recorder"}]
        ways: dict[str, dict[str, Any]] = {
            "one": {},
            "again": {"evaluation.every": 10**6},
            "two": {},
            "cut": {"trainer.gradient_accumulation_steps": 1 if micro_batches > 1 else 2},
            "resumed": {"resume": str(folder / "one")},
        }
        if job.trainer.compile:
            ways["compiled"] = {"trainer.compile": job.trainer.compile}
        return {way: job.changed(every | keys | {"run_dir": str(folder / way)}) for way, keys in ways.items()}

    def rows(self, job: "RunConfig", runs: dict[str, Ended]) -> list[tuple[str, str, str]]:
        """(promise, whether it holds: "yes", "no", or "-" where nobody asks for it, why), of these runs of `ways`.

        Raises the error of a job whose first step fails.
        """
        one, trainer, rows = runs["one"], job.trainer, list[tuple[str, str, str]]()
        if one.error and (isinstance(one.error, ConfigError) or not one.trace):
            raise one.error
        if one.error:
            return [(f"{self.steps} steps and evaluations", "no", one.failed)]
        bits = 16 if trainer.precision in ("bf16", "fp16") else max(16, min(int(name) for name, *_ in one.of("bits")))
        for way in [way for way in PROMISES if way in runs]:
            exact = way in ("again", "resumed")
            holds, why = judged(way, one, runs[way], 0.0 if exact else TOLERANCES[bits], exact or bits == 64)
            if way == "two" and trainer.batch_size_per_rank is not None:
                holds, why = "no", "trainer.batch_size_per_rank is of a rank; type trainer.batch_size=<of all ranks>"
            if way == "cut" and holds == "no" and (trainer.gradient_accumulation_steps == 1 or "BatchNorm" in why):
                holds = "-"
            why += f" (in float{bits})" if holds == "yes" and not exact else ""
            rows.append((PROMISES[way].format(self.ranks), holds, why))
        first = [name for name, number, *_ in one.of("start") if number]  # of an empty one it is 0
        learned = {name for name, _, _, norm in one.of("gradients") if norm}
        held = {name for name, *_ in one.of("held")}
        lost = [name for name, *_ in one.of("beside")] + [name for name in first if name not in held]
        idle = [name for name in first if name in held - learned]
        reasons = [f"no optimizer has {first_of(lost)}; {UNHELD}"] if lost else []
        if idle and not job.strategy.get("find_unused_parameters"):
            freeze = f"type parameters.freeze=[{','.join(idle[:4])}], or use it in the loss"
            reasons.append(f"{first_of(idle)}: no gradient in {self.steps} steps; {freeze}")
        why = ". ".join(reasons) or f"a gradient in {self.steps} steps"
        rows.append(("every weight learns", "no" if reasons else "yes", why))
        return [*rows, ("not looked at", "-", f"fp16, bf16, GPUs, other samples, what begins after step {self.steps}")]


def ended(config: "RunConfig", record: "ConfigRecord", ranks: int) -> Ended:
    """A run on so many ranks. Raises what no other run can be compared with, such as a hang."""
    from lockstep.launchers.local import LocalLauncher
    from lockstep.modes.recorder import run, trace_in
    from lockstep.modes.train import Train
    from lockstep.preflight import build_parts

    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    try:
        parts = build_parts(config, LocalLauncher("fork", ranks), Train())
        parts.launcher.launch(run, config, record, parts)
        return Ended(trace_in(folder))
    except (ConfigError, RankFailed) as error:
        first = {"kind": "config", "type": "", "message": str(error)} | getattr(error, "report", {}).get("first", {})
        if first["kind"] not in ("config", "exception", "diverged", "different"):
            raise
        return Ended(trace_in(folder), error, "; ".join([first["message"], *(known_meaning(first) or ())]))


def judged(way: str, one: Ended, other: Ended, tolerance: float, to_the_end: bool) -> tuple[str, str]:
    """(whether two runs are alike, where they part and why). tolerance: relative; 0: the bits are compared. to_the_end:
    whether more than their first steps are compared."""
    from lockstep.modes.recorder import BY_SAMPLE

    steps = sorted({step for step, stage, _ in other.trace if stage == "weights"})[: None if to_the_end else 1]
    largest = {stage: max([1e-30, *(size for *_, size in one.of(stage))]) for stage in STAGES}
    evaluated = min((step for step, stage, _ in one.trace if stage == "evaluation"), default=10**9)
    apart, most = dict[tuple[int, str, str], float](), 0.0
    for key, own in one.trace.items():
        theirs = other.trace.get(key, own)
        is_of_others = key[1] in BY_SAMPLE and own[0] != theirs[0]  # some shares of a batch need no such layer
        if own == theirs or key[0] not in steps or is_of_others:
            continue
        far = max(abs(own[1] - theirs[1]), abs(own[2] - theirs[2])) / max(FLOOR * largest[key[1]], own[2])
        most = max(most, far)
        # A net that folds weights in an evaluation unfolds them up to rounding.
        limit = TOLERANCES[64] if way == "again" and key[0] > evaluated else tolerance
        if far > limit or not limit:
            apart[key] = far
    step = min((step for step, stage, _ in apart if stage in RESULTS), default=None)
    if step is None:
        return ("no", other.failed) if other.failed else ("yes", f"{most:.0e} apart" if tolerance else "all bits")
    stage = min((stage for of, stage, _ in apart if of == step), key=STAGES.index)
    found = {name: far for (*place, name), far in apart.items() if place == [step, stage]}
    kind = "evaluated" if way == "again" and step > evaluated else way
    cause = CAUSES.get(f"{kind} {stage}") or CAUSES.get(stage) or CAUSES[kind]
    names = next(iter(found)) if stage == "layers" else first_of([*found])
    return "no", f"step {step}, {stage}, {max(found.values()):.0e} apart: {names}: {cause}"
