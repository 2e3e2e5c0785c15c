"""mode=check: which promises hold for a job, and where they break.

It trains the job as typed for a few steps, in float64 and on few samples, in ways that must give the same numbers. The
first stage that parts tells the cause. `lockstep.modes.recorder` is what a rank does. No torch at the top: `main`
imports this. Not covered: fp16 and bf16, GPUs, what begins after these steps, other samples, and what a module draws
when it is imported, since all ranks are forks of one process.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Ge

from lockstep.errors import EXIT_FAILED, ConfigError, RankFailed, StoppedEarly, first_of
from lockstep.failures.explain import known_meaning
from lockstep.modes.base import Mode
from lockstep.text import aligned

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.config.schema import RunConfig
    from lockstep.preflight import Parts

FEW = 7  # samples of a rank's batch, seldom another size of a tensor
TOLERANCES = {64: 1e-6, 32: 1e-3, 16: 0.1}  # relative, by the fewest bits in which a net computes
PROMISES = {
    "again": "the same run, typed again",
    "two": "the same numbers on {} ranks",
    "cut": "the same numbers in micro-batches",
    "resumed": "stopped and resumed, the same bits",
    "compiled": "compiled, the same numbers",
}
MIXES = "compares the samples of a batch, or draws for all of them; gather the samples of all ranks, or draw by sample"
CAUSES = {  # of a way, of a stage, of both
    "start": "the first weights of {names} are others; draw them from torch's generator",
    "samples": "a sample is another one, or depends on what was read before; draw from torch, numpy or random, which "
    "are seeded for it, and change a copy of what the data set keeps",
    "two norm": "{first} sees a rank's share of the batch; type sync_bn=auto strategy=ddp",
    "two layers": f"{{first}} gives other outputs for the same samples: it {MIXES}",
    "two loss": f"the loss is another one: it {MIXES}, and return a value for each sample. Where no layer is shown, "
    "as by a pipeline, a layer may do so, such as a batch norm or dropout; type strategy=ddp",
    "two gradients": "{names}: other gradients of the same loss, as a hook or a backward pass is not linear, or "
    "compares samples; change the gradient of the whole batch, in the optimizer",
    "two weights": "{names}: changed by a rank's own share of the batch; compute it of the samples of all ranks",
    "two evaluation": "{names}: another number of the same weights; return a value for each sample from the task",
    "cut": "{first}: changed in each pass, or by comparing samples; type trainer.gradient_accumulation_steps=1",
    "resumed": "{names}: the model, the loss or a hook keeps what no snapshot has, or draws by itself; make it a "
    "buffer, or return it in get_extra_state, and draw from torch's generator",
    "resumed weights": "{names}: updated otherwise by the same gradients, as the optimizer keeps what its state_dict "
    "does not give back; keep it in self.state[parameter]",
    "again": "{names}: something asks the clock, or a generator that no seed reaches; draw from torch's generator",
    "evaluated": "{names}: an evaluation changes what the training goes on with; change it while self.training alone",
    "compiled": "{names}: a compiled net draws dropout for a rank, or is another one; type trainer.compile=false",
}
UNHELD = "put layers into torch.nn.ModuleList, tensors into torch.nn.ParameterList, and those of a loss into the model"

Row = tuple[str, str, str]
"""A promise, whether it holds ("yes", "no", or "-" where nobody has asked for it), and why."""


class Ended(NamedTuple):
    """A run: what `recorder.run` returns, its trace, and the error that has ended it, in a sentence.

    is_known: whether this sentence names the cause of a broken promise, whatever the trace says.
    """

    facts: dict[str, Any]
    trace: Any
    failed: str = ""
    error: Exception | None = None
    is_known: bool = False


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

        torch.set_num_threads(1)  # this process compares tensors and forks again: it must start no threads
        on = {ranks: self.parts(config, ranks) for ranks in (1, self.ranks)}
        shares = on[self.ranks].strategy.data_share_of(self.ranks)
        prepare_first(config)
        fails = ""
        for precision in dict.fromkeys(["fp64", config.trainer.precision]):  # some nets cannot compute in float64
            job = config.changed({"trainer.precision": precision})
            ways = self.ways(job, shares, Path(get_temp_dir(), precision))
            runs = {"one": ended(ways.pop("one"), record, on[1])}
            if not runs["one"].error:
                runs |= {name: ended(way, record, on[self.ranks if name == "two" else 1]) for name, way in ways.items()}
                break
            fails = runs["one"].failed
        rows = self.rows(job, runs)
        print("\n".join(aligned([("promise", "holds", "because"), *rows])), flush=True)
        if fails and not runs["one"].error:
            print(f"\nrounding in {precision} hides small faults; fp64 fails: {fails}", flush=True)
        if any(holds == "no" for _, holds, _ in rows):
            raise StoppedEarly("a promise does not hold, as the table says", EXIT_FAILED)

    def parts(self, config: "RunConfig", ranks: int) -> "Parts":
        from lockstep.launchers.local import LocalLauncher
        from lockstep.modes.train import Train
        from lockstep.preflight import build_parts

        try:
            return build_parts(config.changed(self.changed), LocalLauncher("fork", ranks), Train())
        except ConfigError as error:
            raise ConfigError(f"mode=check runs on 1 and on {self.ranks} ranks: {error}") from None

    def ways(self, job: "RunConfig", shares: int, folder: Path) -> "dict[str, RunConfig]":
        """The configs of the runs. shares: in which the ranks that are compared with one cut a batch."""
        data, micro_batches = job.loader, job.trainer.gradient_accumulation_steps
        size = min(job.trainer.batch_size, FEW * max(2, shares) * micro_batches)
        few = {key: job.dataset.get(key) for key in ("shape", "classes", "mean", "std")} | {"source": job.dataset}
        few |= {"_target_": "lockstep.modes.recorder.Few", "samples": 5 * size // 2, "hold": None}
        if job.holds_out:
            fold = None if data.folds is None else [data.fold, data.folds]
            few["hold"] = {"size": data.validation, "fold": fold, "seed": data.split_seed, "grouping": data.groups}
        steps = {"trainer.batch_size": size, "trainer.epochs": self.steps, "trainer.max_steps": self.steps}
        changes: dict[str, dict[str, Any]] = {
            "one": {},
            "again": {"evaluation.every": 10**6},
            "two": {},
            "cut": {"trainer.gradient_accumulation_steps": 1 if micro_batches > 1 else 2},
            "resumed": {"resume": str(folder / "one")},
        }
        if job.trainer.compile:
            changes["compiled"] = {"trainer.compile": job.trainer.compile}
        ways = dict[str, "RunConfig"]()
        for way, keys in changes.items():
            place = str(folder / way)
            logger = {"csv": {"_target_": "lockstep.loggers.csv_logger.CSVLogger", "run_dir": place}}
            everywhere = self.changed | steps | {"dataset": few, "run_dir": place, "logger": logger}
            ways[way] = job.changed(everywhere | keys)
        return ways

    def rows(self, job: "RunConfig", runs: dict[str, Ended]) -> list[Row]:
        """The promises of these runs of `ways`. Raises the error that no table can tell."""
        from hydra.utils import get_object

        one, rows, known, sync = runs["one"], list[Row](), list[str](), get_object(job.gradient_sync["_target_"])
        if isinstance(one.error, RankFailed) and one.error.report["first"]["kind"] == "diverged":
            return [("every weight learns", "no", one.failed)]
        if one.error:
            raise one.error
        bits = 16 if job.trainer.precision in ("bf16", "fp16") else max(16, one.facts["bits"])
        if job.trainer.batch_size_per_rank is not None:
            known.append("trainer.batch_size_per_rank makes the batch grow with ranks; type trainer.batch_size=<all>")
        if not sync.is_exact:
            known.append(f"gradient_sync={sync.name} is not the exact mean; type gradient_sync=auto")
        for way in [way for way in PROMISES if way in runs]:
            exact = way in ("again", "resumed")
            holds, why = judged(way, one, runs[way], 0.0 if exact else TOLERANCES[bits], exact or bits == 64)
            if way == "two" and known:
                holds, why = "no", ". ".join(known)
            if way == "cut" and holds == "no" and (job.trainer.gradient_accumulation_steps == 1 or "BatchNorm" in why):
                holds = "-"
            why += f" (in float{bits})" if holds == "yes" and not exact else ""
            rows.append((PROMISES[way].format(self.ranks), holds, why))
        reasons = [f"no optimizer has {first_of(lost)}; {UNHELD}"] if (lost := one.facts["lost"]) else []
        if (idle := one.facts["idle"]) and not job.strategy.get("find_unused_parameters"):
            what = f"{first_of(idle)}: no gradient in {self.steps} steps"
            reasons.append(f"{what}; type parameters.freeze=[{','.join(idle[:4])}], or use it in the loss")
        why = ". ".join(reasons) or f"a gradient in {self.steps} steps"
        return [*rows, ("every weight learns", "no" if reasons else "yes", why)]


def ended(config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> Ended:
    """A run in a world of its own. Raises what no other run can be compared with, such as a hang."""
    from lockstep.modes.recorder import run, trace_in

    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    try:
        return Ended(parts.launcher.launch(run, config, record, parts), trace_in(folder))
    except ConfigError as error:
        return Ended({}, trace_in(folder), str(error), error)
    except RankFailed as error:
        first = error.report["first"]
        if first["kind"] not in ("exception", "diverged", "different"):
            raise
        known = known_meaning(first) if first["kind"] == "exception" else None
        return Ended({}, trace_in(folder), "; ".join(known or [first["message"]]), error, known is not None)


def judged(way: str, one: Ended, other: Ended, tolerance: float, to_the_end: bool) -> tuple[str, str]:
    """(whether two runs are alike, why). to_the_end: whether more than their first steps are compared."""
    from lockstep.modes.recorder import compare

    if other.is_known:
        return "no", other.failed
    parting, most = compare(one.trace, other.trace, tolerance, None if to_the_end else 1)
    if parting is None:
        return ("no", other.failed) if other.failed else ("yes", f"{most:.0e} apart" if tolerance else "all bits")
    step, stage, names, far = parting
    evaluated = min((step for step, of, _ in one.trace if of == "evaluation"), default=step)
    kind = "evaluated" if way == "again" and step > evaluated else way
    cause = "two norm" if (kind, stage) == ("two", "layers") and "BatchNorm" in names[0] else f"{kind} {stage}"
    sentence = CAUSES.get(cause) or CAUSES.get(stage) or CAUSES[kind]
    apart = f"{far:.0e} apart" if far > 1e-99 else "other bits"
    return "no", f"step {step}, {stage}, {apart}: {sentence.format(first=names[0], names=first_of(names))}"
