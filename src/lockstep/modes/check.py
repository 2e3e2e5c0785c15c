"""mode=check: which promises hold for a job, and where they break.

It trains the job as typed for a few steps, in float64 and on few samples, in ways that must give the same numbers:
again, on several ranks, in micro-batches, stopped and resumed. The first stage that parts tells the cause. What a rank
does is in `lockstep.modes.recorder`. No torch at the top: `main` imports this.

Not covered: fp16 and bf16, GPUs, what begins after these steps, other samples, and what a module draws when it is
imported, since all ranks are forks of one process.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from lockstep.distributed.environment import read_rank_info
from lockstep.errors import EXIT_PROMISES, ConfigError, RankFailed, StoppedEarly, first_of
from lockstep.modes.base import Mode
from lockstep.text import aligned

if TYPE_CHECKING:
    from lockstep.config.record import ConfigRecord
    from lockstep.config.schema import RunConfig
    from lockstep.modes.recorder import Facts, Parting, Trace
    from lockstep.preflight import Parts
    from lockstep.strategies.base import JobSpec

FEW, EVALUATED = 7, 9  # samples of a rank's batch, seldom another size of a tensor; samples of an evaluation
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}  # relative; of halves 0.1
SMALL: dict[str, Any] = {
    "backend.name": "gloo",
    "logging.every": 1,
    "profiler.enabled": False,
    "snapshot.every": "1epochs",
    "snapshot.mirror": None,
    "evaluation.every": 1,
    "evaluation.batch_size": 4,
    "evaluation.patience": None,
    "evaluation.test": "every",
    "trainer.precision": "fp64",
    "trainer.batch_size_per_rank": None,
    "trainer.max_time": None,
    "trainer.pause_after": None,
    "trainer.final": None,
    "trainer.compile": False,
}
MIXES = "compares the samples of a batch, or draws for all of them; gather the samples of all ranks, or draw by sample"
CAUSES = {  # of a stage, or of a run, or of a stage of a run
    "start": "the first weights {names} are others; draw them from torch's generator",
    "samples": "a sample is another one, or depends on what was read before; draw from torch, numpy or random, which "
    "are seeded for it, and change a copy of what the data set keeps",
    "two norm": "sees a rank's share of the batch; type sync_bn=auto strategy=ddp",
    "cut norm": "sees one micro-batch at a time",
    "two layers": f"{{first}} gives other outputs for the same samples: it {MIXES}",
    "two loss": f"the loss of the same outputs is another one: it {MIXES}, and return a sum over samples",
    "two gradients": "{names} get other gradients of the same loss: a hook or a backward pass is not linear, or "
    "compares samples; change the gradient of the whole batch, in the optimizer",
    "two weights": "{names} change by a rank's own share of the batch; compute them of the samples of all ranks",
    "two evaluation": "{names} of the same weights are others; return sums over samples from the task",
    "resumed": "{names}: the model, the loss or a hook keeps what no snapshot has, or draws by itself; make it a buffer, "
    "or return it in get_extra_state, and draw from torch's generator",
    "resumed weights": "{names} are updated otherwise by the same gradients: the optimizer keeps what its state_dict "
    "does not give back; keep it in self.state[parameter]",
    "again": "{names}: something asks the clock, or a generator that no seed reaches; draw from torch's generator",
    "evaluated": "{names}: an evaluation changes what the training goes on with; change it while self.training alone",
    "compiled": "{names}: a compiled net draws dropout for a rank, or is another one; type trainer.compile=false",
}
UNHELD = "put layers into torch.nn.ModuleList, tensors into torch.nn.ParameterList, and those of a loss into the model"


PROMISES = {
    "again": "the same run, typed again",
    "two": "the same numbers on {} ranks",
    "cut": "the same numbers in micro-batches",
    "resumed": "stopped and resumed, the same bits",
    "compiled": "compiled, the same numbers",
}
Row = tuple[str, str, str]
"""A promise, whether it holds ("yes", "no", or "-" where nobody has asked for it), and why."""


@dataclass(frozen=True)
class Ended:
    """A run. traces: of its ranks. error: what has ended it, and `failed`, its sentence."""

    facts: "Facts"
    traces: "list[Trace]"
    failed: str = ""
    error: Exception | None = None


class Check(Mode):
    """Takes a few steps in several ways, and prints a table. Nothing of a run is written.

    The ranks are forks of this process on this machine's CPUs, whatever `launch` says.
    steps: of a run; three are an epoch. ranks: that are compared with one.
    """

    name, starts_ranks = "check", True

    def __init__(self, steps: Annotated[int, Ge(4)], ranks: Annotated[int, Ge(2)]) -> None:
        self.steps, self.ranks = steps, ranks

    def validate(self, job: "JobSpec") -> None:
        info = read_rank_info()
        if not info.may_start_ranks:
            what = f"mode=check starts its ranks itself, and {info.started_by} has started this process as one"
            raise ConfigError(f"{what}; type python src/train.py mode=check")

    def work(self, config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> None:
        """Ends the process with EXIT_PROMISES if a promise does not hold."""
        from multiprocessing.util import get_temp_dir

        import torch

        from lockstep.data.build import prepare_first

        torch.set_num_threads(1)  # this process compares tensors and forks again: it must start no threads
        folder, replicas = Path(get_temp_dir()), config.strategy.get("replicas", 1)  # it goes with this process
        if replicas > 1:  # each has two ranks or more
            config = config.changed({"strategy.replicas": 1})
        parts_of = {ranks: parts_for(config, ranks) for ranks in (1, self.ranks)}
        prepare_first(config)
        job, notes = config, list[str]()
        for precision in dict.fromkeys(["fp64", config.trainer.precision]):
            job = config.changed({"trainer.precision": precision})
            ways = self.ways(job, parts_of[self.ranks].strategy.data_parallel_size(self.ranks), folder / precision)
            runs = {"one": take(ways["one"], record, parts_of[1])}
            failed = runs["one"].failed
            if not failed:
                break
            notes = [f"compared in {config.trainer.precision}, where rounding hides small faults; in fp64: {failed}"]
        error = runs["one"].error
        if isinstance(error, RankFailed) and error.report["first"]["kind"] == "diverged":
            notes = []
        elif error is not None:
            raise error
        else:
            ranks = {name: self.ranks if name == "two" else 1 for name in ways}
            runs |= {name: take(way, record, parts_of[ranks[name]]) for name, way in ways.items() if name != "one"}
        rows = self.rows(job, runs)
        notes += [f"the ranks were checked with strategy.replicas=1, not {replicas}"] * (replicas > 1)
        notes += [f"warning: {text}" for text in runs["one"].facts.get("warnings", ())]
        lines = aligned([("promise", "holds", "because"), *rows])
        print("\n".join([*lines, *([""] if notes else []), *notes]), flush=True)
        if any(holds == "no" for _, holds, _ in rows):
            raise StoppedEarly("a promise does not hold, as the table says", EXIT_PROMISES)

    def ways(self, job: "RunConfig", shares: int, folder: Path) -> "dict[str, RunConfig]":
        """The configs of the runs. shares: in which the ranks that are compared with one cut a batch."""
        trainer, micro_batches = job.trainer, job.trainer.gradient_accumulation_steps
        size = min(trainer.batch_size, FEW * max(2, shares) * micro_batches)
        keys = {key: job.dataset.get(key) for key in ("shape", "classes", "mean", "std")}
        data = job.loader
        hold = {"size": data.validation, "fold": None if data.fold is None else [data.fold, data.folds]}
        hold |= {"seed": data.split_seed, "grouping": data.groups}
        few = {"_target_": "lockstep.modes.recorder.Few", "source": job.dataset, "hold": hold if job.holds_out else None}
        few |= {"samples": 5 * size // 2, "evaluated": EVALUATED}
        small = job.changed(SMALL | {"dataset": keys | few, "trainer.batch_size": size})
        small = small.changed({"trainer.epochs": self.steps, "trainer.max_steps": self.steps})
        changes: dict[str, dict[str, Any]] = {
            "one": {},
            "again": {"evaluation.every": 10**6},
            "two": {},
            "cut": {"trainer.gradient_accumulation_steps": 1 if micro_batches > 1 else 2},
            "resumed": {"resume": str(folder / "one")},
        }
        if trainer.compile:
            changes["compiled"] = {"trainer.compile": trainer.compile}
        logged = {"_target_": "lockstep.loggers.csv_logger.CSVLogger"}
        places = {name: str(folder / name) for name in changes}
        return {
            name: small.changed(own | {"run_dir": places[name], "logger": {"csv": logged | {"run_dir": places[name]}}})
            for name, own in changes.items()
        }

    def rows(self, job: "RunConfig", runs: "dict[str, Ended]") -> list[Row]:
        """The promises, of the runs of `ways`; of "one" alone if it has failed."""
        one, learns = runs["one"], "every weight learns"
        if one.failed:
            return [(learns, "no", one.failed)]
        coarse = "float16" if job.trainer.precision in ("bf16", "fp16") else one.facts["coarse"]
        tolerance, steps = TOLERANCES.get(coarse, 0.1), self.steps if coarse == "float64" else 1

        rows: list[Row] = []
        for way, promise in PROMISES.items():
            if way not in runs:
                continue
            exact = (0.0, self.steps) if way in ("again", "resumed") else (tolerance, steps)
            holds, why = judged(way, one, runs[way], *exact, coarse)
            if way == "two" and (reasons := known(job)):
                holds, why = "no", ". ".join(reasons)
            is_asked = job.trainer.gradient_accumulation_steps > 1 and not why.endswith(CAUSES["cut norm"])
            rows.append((promise.format(self.ranks), "-" if way == "cut" and holds == "no" and not is_asked else holds, why))
        lost, idle = one.facts["lost"], [] if job.strategy.get("find_unused_parameters") else one.facts["idle"]
        reasons = [f"no optimizer has {first_of(lost)}; {UNHELD}"] if lost else []
        if idle:
            what = f"{first_of(idle)} get no gradient in {self.steps} steps"
            reasons.append(f"{what}; type parameters.freeze=[{','.join(idle[:4])}], or use them in the loss")
        rows.append((learns, "no" if reasons else "yes", ". ".join(reasons) or f"a gradient in {self.steps} steps"))
        return rows


def known(job: "RunConfig") -> list[str]:
    """Why numbers depend on the number of ranks, whatever the first steps show."""
    from hydra.utils import get_object

    sync, reasons = get_object(job.gradient_sync["_target_"]), []
    if not sync.is_exact:
        reasons.append(f"gradient_sync={sync.name} is not the exact mean; type gradient_sync=auto")
    if job.trainer.batch_size_per_rank is not None:
        reasons.append("trainer.batch_size_per_rank makes the batch grow with ranks; type trainer.batch_size=<all>")
    return reasons


def judged(way: str, one: Ended, other: Ended, tolerance: float, steps: int, coarse: str) -> tuple[str, str]:
    """(whether two runs are alike, why)."""
    from lockstep.modes.recorder import compare

    parting, most = compare(one.traces[0], other.traces, tolerance, steps) if other.traces else (None, 0.0)
    if parting is None and other.failed:
        return "no", other.failed
    if parting is None:
        return "yes", f"apart by at most {most:.0e} (in {coarse})" if tolerance else "all bits"
    step, stage, names, far = parting
    evaluated = min((step for step, found in one.traces[0].items() if "evaluation" in found), default=step)
    kind = {"cut": "two", "again": "evaluated" if step > evaluated else way}.get(way, way)
    sentence = CAUSES.get(f"{kind} {stage}") or CAUSES.get(stage) or CAUSES[kind]
    if kind == "two" and stage == "layers" and "BatchNorm" in names[0]:
        sentence = f"{{first}} {CAUSES[f'{way} norm']}"
    apart = f"{far:.0e} apart" if far > 1e-99 else "other bits"
    return "no", f"step {step}, {stage}, {apart}: {sentence.format(first=names[0], names=first_of(names))}"


def parts_for(config: "RunConfig", ranks: int) -> "Parts":
    """Of a world of forks on this machine."""
    from lockstep.launchers.local import SpawnLauncher
    from lockstep.modes.train import Train
    from lockstep.preflight import build_parts

    launcher = SpawnLauncher("fork", ranks, 1, 0, "127.0.0.1", 0)
    launcher.prepare("lockstep.launchers.rank_imports")
    try:
        return build_parts(config.changed(SMALL), launcher, Train())
    except ConfigError as error:
        raise ConfigError(f"mode=check runs on 1 and on 2 ranks: {error}") from None


def take(config: "RunConfig", record: "ConfigRecord", parts: "Parts") -> Ended:
    """A run in a world of its own. Raises what no run can go round, such as a hang."""
    from lockstep.modes.recorder import run, traces_in

    Path(config.run_dir).mkdir(parents=True)
    facts, failed, error = {}, "", None
    try:
        facts = parts.launcher.launch(run, config, record, parts)
    except ConfigError as refused:
        failed, error = str(refused), refused
    except RankFailed as ended:
        failed, error = ended.report["first"].get("message", ""), ended
        if ended.report["first"]["kind"] not in ("exception", "diverged", "different"):
            raise
    return Ended(facts, traces_in(Path(config.run_dir)), failed, error)
