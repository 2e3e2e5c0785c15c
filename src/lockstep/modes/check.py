"""mode=check: which promises hold for a job, and where they break.

It trains the job as typed for a few steps, in float64 and on few samples, in ways that must give the same numbers. The
first stage that parts tells the cause. Such a run is an ordinary training, which a callback sees, by the hooks that
PyTorch has for all modules and all optimizers. All ranks are forks of one process: what a module draws when it is
imported is not seen, either.
"""

import os
import shutil
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Subset

from lockstep import errors
from lockstep.build import build_parts
from lockstep.compat import is_of_transform
from lockstep.config.check import flatten
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.data.build import prepare_first
from lockstep.data.source import DataSource, Splits, class_numbers, tensors_in, unwrapped
from lockstep.distributed import signals
from lockstep.distributed.host import give_back_freed_memory
from lockstep.errors import EXIT_FAILED, ConfigError, RankFailed, StoppedEarly, aligned, first_of
from lockstep.failures.explain import known_meaning
from lockstep.launchers.local import LocalLauncher
from lockstep.loggers.base import Logger
from lockstep.modes.base import Mode, Parts
from lockstep.modes.train import Train
from lockstep.snapshots.files import list_snapshots
from lockstep.strategies.base import local_part
from lockstep.training.callbacks import Callback
from lockstep.training.run import Run

STAGES = ("start", "samples", "layers", "loss", "gradients", "weights", "evaluation")
RESULTS = STAGES[3:]  # which decide whether runs part; the others say why
BY_SAMPLE = STAGES[1:3]  # to which each sample adds
FEW = 7  # samples of a rank's batch, seldom another size of a tensor
EVALUATED = 9  # samples of an evaluation
NOISE = 0.7  # eps to this power, of the largest gradient: what is smaller is rounding
FLOOR = 1e-3  # of the largest value of a stage: what differences are relative to, at least
GROWTH = 1e7  # from step to step, of rounding in a deep net whose gradients are large; a fault comes at once
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

Trace = dict[tuple[int, str, str], Tensor]
"""{(step, stage, name): (a number, two sums)}, in the order of their events. The number is of the samples in "samples"
and "layers", and a checksum of all bits in "start", "loss", "gradients", "weights" (and buffers) and "evaluation". Of
step 0 by name alone: "bits", in which a part of the net computes; weights "held" by an optimizer, and "beside" the
model."""
NOTHING = torch.zeros(3, dtype=torch.float64)


class Ended(NamedTuple):
    """A run: its trace, of numbers, and what has ended it too early."""

    trace: dict[tuple[int, str, str], Any]
    error: Exception | None = None
    failed: str = ""

    def of(self, stage: str) -> list[tuple[str, int, float, float]]:
        """[(name, number, sums)] of all steps."""
        return [(name, *value) for (_, of, name), value in self.trace.items() if of == stage]


class Check(Mode):
    """Takes a few steps in several ways, and prints a table. Nothing of a run is written.
    The ranks are forks of this process on this machine's CPUs, whatever `launch` says.
    steps: of each run. ranks: that are compared with one. changed: {section: {key: what is not as typed}}."""

    name, starts_ranks, needs_run = "check", True, False

    def __init__(self, steps: Annotated[int, Ge(4)], ranks: Annotated[int, Ge(2)], changed: dict[str, Any]) -> None:
        self.steps, self.ranks, self.changed = steps, ranks, flatten(changed)

    def work(self, config: RunConfig, record: ConfigRecord, parts: Parts) -> None:
        """Ends the process with EXIT_FAILED if a promise does not hold."""
        torch.set_num_threads(1)  # this process forks again: it must start no threads
        prepare_first(config)
        shares, fails = parts.strategy.data_share_of(self.ranks), ""
        for precision in dict.fromkeys(["fp64", config.trainer.precision]):  # some nets cannot compute in float64
            job = config.changed({"trainer.precision": precision})
            ways = self.ways(job, shares, Path(get_temp_dir(), precision))  # it goes with this process, also at Ctrl-C
            runs = {"one": ended(ways.pop("one"), record, 1)}
            if not runs["one"].error:
                for name, way in ways.items():
                    runs[name] = ended(way, record, self.ranks if name == "two" else 1)
                    shutil.rmtree(way.run_dir)  # a large net would fill the disk
                break
            fails = runs["one"].failed
        rows = self.rows(job, runs)
        print("\n".join(aligned([("promise", "holds", "because"), *rows])), flush=True)
        if fails and not runs["one"].error:
            print(f"rounding in {precision} hides small faults; fp64 fails: {fails}", flush=True)
        if any(holds == "no" for _, holds, _ in rows):
            raise StoppedEarly("a promise does not hold, as the table says", EXIT_FAILED)

    def ways(self, job: RunConfig, shares: int, folder: Path) -> dict[str, RunConfig]:
        """The configs of the runs. shares: in which the ranks that are compared with one cut a batch."""
        micro_batches = job.trainer.gradient_accumulation_steps
        size = min(job.trainer.batch_size, FEW * max(2, shares) * micro_batches)
        few = {key: job.dataset.get(key) for key in ("shape", "classes", "mean", "std")} | {"source": job.dataset}
        few |= {"_target_": "lockstep.modes.check.Few", "samples": 5 * size // 2}
        every = self.changed | {"dataset": few, "trainer.batch_size": size, "logger": {}}
        every |= {"trainer.epochs": self.steps, "trainer.max_steps": self.steps}
        every["callbacks"] = [*job.callbacks, {"_target_": "lockstep.modes.check.Recorder"}]
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

    def rows(self, job: RunConfig, runs: dict[str, Ended]) -> list[tuple[str, str, str]]:
        """(promise, whether it holds: "yes", "no", or "-" where nobody asks for it, why), of these runs of `ways`.
        Raises the error of a job whose first step fails."""
        one, trainer, rows = runs["one"], job.trainer, list[tuple[str, str, str]]()
        if isinstance(one.error, ConfigError):
            raise one.error
        if isinstance(one.error, RankFailed) and not one.trace:  # its log and its folder do not stay
            raise RankFailed(str(one.error).partition("\nits log, ")[0], one.error.report)
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


def ended(config: RunConfig, record: ConfigRecord, ranks: int) -> Ended:
    """A run on so many ranks. Raises what no other run can be compared with, such as a hang."""
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
    except StoppedEarly as stopped:  # which ranks that print nothing have told
        how = "Ctrl-C" if stopped.code == errors.EXIT_INTERRUPTED else "a signal"
        errors.print_line(f"lockstep: ended by {how}; there is nothing to save", sys.stderr)
        raise


def judged(way: str, one: Ended, other: Ended, tolerance: float, to_the_end: bool) -> tuple[str, str]:
    """(whether two runs are alike, where they part and why). tolerance: relative; 0: the bits are compared. to_the_end:
    whether more than their first steps are compared."""
    steps = sorted({step for step, stage, _ in other.trace if stage == "weights"})[: None if to_the_end else 1]
    largest = {stage: max([1e-30, *(size for *_, size in one.of(stage))]) for stage in STAGES}
    evaluated = min((step for step, stage, _ in one.trace if stage == "evaluation"), default=10**9)
    apart, most = dict[tuple[int, str, str], float](), {0: 0.0}
    for key, own in one.trace.items():
        theirs = other.trace.get(key, own)
        is_of_others = key[1] in BY_SAMPLE and own[0] != theirs[0]  # some shares of a batch need no such layer
        if own == theirs or key[0] not in steps or is_of_others:
            continue
        far = max(abs(own[1] - theirs[1]), abs(own[2] - theirs[2])) / max(FLOOR * largest[key[1]], own[2])
        if key[1] in RESULTS:
            most[key[0]] = max(most.get(key[0], 0.0), far)
        # A net that folds weights in an evaluation unfolds them up to rounding.
        limit = TOLERANCES[64] if way == "again" and key[0] > evaluated else tolerance
        if far > limit or not limit:
            apart[key] = far
    step = min((step for step, stage, _ in apart if stage in RESULTS), default=None)
    if step is None:
        alike = f"{max(most.values()):.0e} apart" if tolerance else "all bits"
        return ("no", other.failed) if other.failed else ("yes", alike)
    stage = min((stage for of, stage, _ in apart if of == step), key=STAGES.index)
    if other.failed and stage == "gradients":  # nothing was averaged: the error tells why
        return "no", other.failed
    found = {name: far for (*place, name), far in apart.items() if place == [step, stage]}
    before = most.get(step - 1, 0.0)
    if tolerance and max(found.values()) < GROWTH * before and not other.failed:
        return "yes", f"{before:.0e} apart in step {step - 1}, from which on rounding grows"
    kind = "evaluated" if way == "again" and step > evaluated else way
    cause = CAUSES.get(f"{kind} {stage}") or CAUSES.get(stage) or CAUSES[kind]
    names = next(iter(found)) if stage == "layers" else first_of([*found])
    return "no", f"step {step}, {stage}, {max(found.values()):.0e} apart: {names}: {cause}"


@dataclass(kw_only=True)
class Few(DataSource):
    """So many samples of a run's data, which are prepared. What a run holds out are here some of the tests'."""

    source: Any
    samples: int

    def splits(self) -> Splits:
        train, test, val = self.source.splits()
        if getattr(unwrapped(train)[0], "draws", None):
            unwrapped(train)[0].draws = self.samples
        return Splits(few(train, self.samples), few(test, EVALUATED), few(val or test, EVALUATED))


def few(data: Any, count: int) -> Any:
    """`count` samples at even distances. The largest class is there, as it may tell how many there are."""
    numbers, classes = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int), class_numbers(data)
    if classes is not None:
        numbers[-1] = int(classes.argmax())
    return Subset(data, np.unique(numbers).tolist())


def run(config: RunConfig, record: ConfigRecord, parts: Parts) -> None:
    """A rank trains, and prints nothing. `resume` is another run, whose oldest snapshot is taken."""
    if config.resume is not None:
        config = config.changed({"resume": str(list_snapshots(Path(config.resume, "snapshots"))[-1])})
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    parts.mode.work(config, record, parts)


class Recorder(Callback):
    """Leaves the trace of a rank in the run folder."""

    def __init__(self) -> None:
        self.trace: Trace = {}
        self.rows = 0  # samples of a forward pass

    def on_fit_start(self, run: Run, logger: Logger) -> None:
        signals.listen()  # there is nothing to save: the first signal ends this rank
        self.run, own = run, dict(run.model.named_parameters())
        self.names = {of: f"{name or 'model'} ({type(of).__name__})" for name, of in run.model.named_modules()}
        self._keep("start", {name: weight for name, weight in own.items() if weight.requires_grad}, ahead=1)
        types = {weight.dtype for weight in own.values() if weight.is_floating_point()}
        self.trace |= {(0, "bits", str(8 * dtype.itemsize)): NOTHING for dtype in types}
        register_optimizer_step_pre_hook(self._before_update)
        if not run.config.trainer.compile:  # which would compile the hooks, too
            register_module_forward_pre_hook(self._before_forward)
            register_module_forward_hook(self._after_forward)

    def on_step_end(self, run: Run) -> None:
        self._keep("loss", run.meter.means(run.world.all_reduce_sum(run.meter.flush().clone()).tolist()))
        self._keep("weights", dict([*run.model.named_parameters(), *run.model.named_buffers()]))

    def on_evaluation(self, run: Run, split: str, metrics: Mapping[str, float]) -> None:
        self._keep("evaluation", {f"{split}/{name}": value for name, value in metrics.items()})

    def _keep(self, stage: str, values: Mapping[str, Any], ahead: int = 0) -> None:
        step = self.run.progress.step + ahead
        new = {(step, stage, name): value for name, value in values.items() if (step, stage, name) not in self.trace}
        self.trace |= {key: kept(value) for key, value in new.items()}
        if stage in ("weights", "evaluation"):
            torch.save(self.trace, Path(self.run.config.run_dir, f"trace_{self.run.world.rank}.pt"))
            give_back_freed_memory()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module is self.run.strategy.evaluated and module.training:
            self.rows = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
            self._add("samples", "samples", inputs)

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if module in self.names:
            self._add("layers", self.names[module], outputs)
        else:  # around the model, or of a loss
            self._look_behind(outputs)
        if module is self.run.strategy.evaluated:
            self.rows = 0  # a checkpointed block computes again in the backward pass

    def _add(self, stage: str, name: str, values: Any) -> None:
        """What is by samples in `values`, to what the same layer has returned for other samples of the batch."""
        key = (self.run.progress.step + 1, stage, name)
        plain = [t for t in tensors_in(values) if not (isinstance(t, DTensor) or is_of_transform(t))]
        fitting = [t for t in plain if self.rows and t.layout == torch.strided and t.dim() and t.numel()]
        found = [summed(0, t.detach().reshape(self.rows, -1)) for t in fitting if len(t) % self.rows == 0]
        if found:
            self.trace[key] = sum(found, self.trace.get(key, NOTHING) + torch.tensor([self.rows, 0, 0]))

    def _look_behind(self, outputs: Any) -> None:
        """Look in autograd's graph for computing in another type, and for weights that the model has not."""
        nodes, seen = [tensor.grad_fn for tensor in tensors_in(outputs)], set[Any]()
        # Of weights in parts nothing is known.
        own = {id(weight) for weight in self.run.model.parameters() if not isinstance(weight, DTensor)}
        while nodes:
            node: Any = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            weight = getattr(node, "variable", None)
            if own and isinstance(weight, nn.Parameter) and id(weight) not in own:
                self.trace[0, "beside", f"the weight of shape {list(weight.shape)} beside the model"] = NOTHING
            if "ToCopy" in node.name():
                self.trace[0, "bits", "32"] = NOTHING
            with suppress(RuntimeError):  # before torch 2.14 a function of the user's may not tell
                nodes += [following for following, _ in node.next_functions]

    @torch.no_grad()
    def _before_update(self, optimizer: Any, *_: Any) -> None:
        step, weights = self.run.progress.step + 1, dict(self.run.model.named_parameters())
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        self.trace |= {(0, "held", name): NOTHING for name, weight in weights.items() if id(weight) in held}
        own = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        self._keep("gradients", own, ahead=1)
        # Of a gradient that is zero rounding leaves something, and an optimizer such as Adam makes a whole step of it.
        largest = max([float(self.trace[step, "gradients", name][2]) for name in own], default=0.0)
        for part in [part for part in map(local_part, own.values()) if part.layout == torch.strided]:
            part.masked_fill_(part.abs() < largest * torch.finfo(part.dtype).eps ** NOISE, 0)


def summed(number: int, rows: Tensor) -> Tensor:
    """(number, a weighted sum over rows (n, values), the sum of their norms, which is not linear)."""
    weighted = rows.cpu().double() * torch.linspace(1, 2, rows.shape[1], dtype=torch.float64)
    return torch.stack([weighted.new_tensor(number), weighted.sum(), weighted.norm(dim=1).sum()]).nan_to_num(0, 0, 0)


def kept(value: Any) -> Tensor:
    """Of a number, or of a tensor that may be in parts, sparse or complex. Of one in parts a collective."""
    whole = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    whole = whole if whole.layout == torch.strided else whole.to_dense()
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    # A copy: a storage that numpy has seen cannot be freed, and FSDP2 frees gathered weights.
    values = whole.cpu().reshape(1, -1).clone()
    return summed(zlib.crc32(values[0].view(torch.uint8).numpy().data), values)


def trace_in(folder: Path) -> dict[tuple[int, str, str], tuple[float, ...]]:
    """Of all ranks of a run: what each adds by its samples, and of all else the first one's."""
    found: Trace = {}
    for trace in [torch.load(path, weights_only=True) for path in sorted(folder.glob("trace_*.pt"))]:
        for key, value in trace.items():
            found[key] = found[key] + value if key in found and key[1] in BY_SAMPLE else found.get(key, value)
    return {key: tuple(value.tolist()) for key, value in found.items()}
