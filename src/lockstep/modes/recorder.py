"""What a run of mode=check computes, stage by stage, and where two such runs part.

The run is an ordinary training. It is seen by the hooks that PyTorch has for all modules and all optimizers, and by its
own metrics.csv: nothing in a training knows of this file.
"""

import math
import os
import random
import zlib
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import Subset

from lockstep.compat import is_of_transform
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.data.source import DataSource, Splits, class_numbers, tensors_in, unwrapped
from lockstep.data.split import hold_out
from lockstep.distributed import signals
from lockstep.loggers.csv_logger import read_rows
from lockstep.modes.train import Train
from lockstep.preflight import Parts
from lockstep.snapshots.files import list_snapshots, step_of

STAGES = ("start", "samples", "layers", "loss", "gradients", "weights", "evaluation")
RESULTS, BY_SAMPLE, OF_MODEL = STAGES[3:], STAGES[1:3], STAGES[4:6]  # RESULTS decide whether runs part, others say why
FLOORS = {"layers": 1e-9, "loss": 1e-3, "gradients": 1e-3, "weights": 1e-3}  # of the largest value of the stage
NOISE = 0.7  # eps to this power, of the largest gradient: what is smaller is rounding
PARTS = 1024  # of a tensor, of each of which a sum is kept
EVALUATED = 9  # samples of an evaluation
NOTHING = torch.empty(0)

Trace = dict[tuple[int, str, str], tuple[int, Tensor]]
"""{(step, stage, name): (checksum, sums)}, in the order of their events. samples, layers: (n, 2), two sums for each
sample over the inputs, and over what a layer returned for it. start, gradients, weights (with buffers): `kept`."""


@dataclass(kw_only=True)
class Few(DataSource):
    """So many samples of a run's data. hold: arguments of `hold_out`; None: there is no validation set."""

    source: Any
    hold: Any
    samples: int

    def prepare(self) -> None:
        self.source.prepare()

    def splits(self) -> Splits:
        train, test, val = self.source.splits()
        if val is None and self.hold is not None:
            train, val = hold_out(train, **self.hold)
        return Splits(
            few(train, self.samples), few(test, EVALUATED), None if self.hold is None else few(val, EVALUATED)
        )


def few(data: Any, count: int) -> Any:
    """`count` samples at even distances. The largest class is there, as it may tell how many there are."""
    numbers, classes = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int), class_numbers(data)
    if classes is not None:
        numbers[-1] = int(classes.argmax())
    whole, indices = unwrapped(Subset(data, np.unique(numbers)))  # type: ignore[arg-type]  # an array is enough
    if getattr(whole, "draws", None):
        whole = copy(whole)
        whole.draws = count
    return Subset(whole, indices)  # type: ignore[arg-type]


def run(config: RunConfig, record: ConfigRecord, parts: Parts) -> dict[str, Any]:
    """A rank trains, prints nothing, and leaves its trace in the run folder. `resume` is another run: its oldest
    snapshot is taken. Returns what `Recorder.facts` says."""
    done, folder = 0, Path(config.run_dir)
    if config.resume is not None:
        other, steps = Path(config.resume), config.trainer.max_steps or 1
        snapshot = list_snapshots(other / "snapshots")[-1]
        updates = max((step for step, stage, _ in trace_in(other) if stage == "weights"), default=steps)
        config = config.changed({"resume": str(snapshot)})
        done = step_of(snapshot) * updates // steps  # a step of two optimizers has two
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    random.seed()  # as in the processes of a launcher that does not fork
    np.random.seed()
    recorder = Recorder(parts, done)
    with ExitStack() as hooks:
        hooks.callback(lambda: torch.save(recorder.trace, folder / f"trace_{os.environ['RANK']}.pt"))
        hooks.enter_context(optimizers.register_optimizer_step_pre_hook(recorder.before_update))
        hooks.enter_context(optimizers.register_optimizer_step_post_hook(recorder.after_update))
        if not config.trainer.compile:  # which would compile the hooks, too
            hooks.enter_context(modules.register_module_forward_pre_hook(recorder.before_forward))
            hooks.enter_context(modules.register_module_forward_hook(recorder.after_forward))
        Train().work(config, record, parts)
    return recorder.facts()


class Recorder:
    """The trace of this rank, by updates. done: those before its first one."""

    def __init__(self, parts: Parts, done: int) -> None:
        self.strategy, self.step, self.rows, self.depth, self.bits = parts.strategy, done, 0, 0, 64
        self.trace: Trace = {}
        self.names: dict[nn.Module, str] = {}
        self.called, self.optimized, self.learning, self.lost = set[str](), set[int](), set[str](), set[str]()

    def facts(self) -> dict[str, Any]:
        """bits: the fewest in which a part of the net computes. idle: weights without a gradient in all steps, or with
        one of zeros. lost: weights that no optimizer has."""
        trained = {name: weight for name, weight in self.strategy.model.named_parameters() if weight.requires_grad}
        lost = [*self.lost, *(name for name, weight in trained.items() if id(weight) not in self.optimized)]
        idle = [name for name in trained if name not in {*self.learning, *lost}]
        return {"bits": self.bits, "idle": idle, "lost": lost}

    @torch.no_grad()
    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module is not getattr(self.strategy, "model", None) or not module.training:
            return
        if not self.trace:
            signals.listen()  # there is nothing to save: the first signal ends this rank
            self._keep("start", self.step + 1, module.named_parameters())
        self.names = {part: f"{name} ({type(part).__name__})" for name, part in module.named_modules()}
        self.names[module] = type(module).__name__
        self.rows, self.called = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0), set()
        self._keep_by_sample("samples", "samples", inputs)

    def after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        is_model = module is getattr(self.strategy, "model", None) and bool(self.names)
        if self.rows and module in self.names:
            self._keep_by_sample("layers", self.names[module], outputs)
        if is_model:
            self.rows = 0  # a checkpointed block computes again in the backward pass
        if is_model or (self.names and module not in self.names and module.training):  # such as that of a loss
            self._look_behind([tensor.grad_fn for tensor in tensors_in(outputs)])

    def _keep(self, stage: str, step: int, named: Iterable[tuple[str, Tensor]]) -> None:
        self.trace |= {(step, stage, name): kept(value) for name, value in named}

    def _keep_by_sample(self, stage: str, name: str, values: Any) -> None:
        """Of the first call of a layer in a forward pass."""
        key, sums = (self.step + 1, stage, name), sums_by_sample(values, self.rows) if self.rows else None
        if sums is not None and name not in self.called:
            self.trace[key] = 0, torch.cat([self.trace[key][1], sums]) if key in self.trace else sums
        self.called.add(name)

    def _look_behind(self, nodes: list[Any]) -> None:
        """Look in autograd's graph for computing in another type, and for weights that the model has not."""
        own, seen = list(self.strategy.model.parameters()), set[Any]()
        known, has_parts = {id(weight) for weight in own}, any(isinstance(weight, DTensor) for weight in own)
        self.bits = min([self.bits, *(8 * w.itemsize for w in own if w.is_floating_point())])
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self.bits = min(self.bits, 32) if "ToCopy" in node.name() else self.bits
            weight = getattr(node, "variable", None)
            if isinstance(weight, nn.Parameter) and id(weight) not in known and not has_parts:
                self.lost.add(f"the weight of shape {list(weight.shape)} beside the model")
            with suppress(RuntimeError):  # before torch 2.14 a function of the user's may not tell
                nodes += [following for following, _ in node.next_functions]

    @torch.no_grad()
    def before_update(self, optimizer: Any, *_: Any) -> None:
        self.optimized |= {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        self.depth += 1
        if self.depth > 1:  # an optimizer inside of another one
            return
        self.step += 1
        own = {name: weight.grad for name, weight in self.strategy.model.named_parameters() if weight.grad is not None}
        gradients = {name: whole(gradient) for name, gradient in own.items()}
        sizes = {name: float(gradient.norm(math.inf)) for name, gradient in gradients.items() if gradient.numel()}
        self.learning |= {name for name, size in sizes.items() if size}
        self._keep("gradients", self.step, gradients.items())
        # Of a gradient that is zero rounding leaves something, and an optimizer such as Adam makes a whole step of it.
        for gradient in own.values():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local.layout == torch.strided and sizes:
                local.masked_fill_(local.abs() < max(sizes.values()) * torch.finfo(local.dtype).eps ** NOISE, 0)

    @torch.no_grad()
    def after_update(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            model = self.strategy.model
            self._keep("weights", self.step, [*model.named_parameters(), *model.named_buffers()])


def whole(value: Any) -> Tensor:
    """All of a tensor that may be in parts, or sparse, as real numbers. Of one in parts a collective."""
    found: Tensor = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    found = found if found.layout == torch.strided else found.to_dense()
    return torch.view_as_real(found) if found.is_complex() else found


def kept(value: Tensor) -> tuple[int, Tensor]:
    """(a checksum of its bits, sums over `PARTS` parts of it in float64, and what is left over)."""
    # A copy: a storage that numpy has seen cannot be freed, and FSDP2 frees gathered weights.
    values = whole(value).cpu().contiguous().reshape(-1).clone()
    parts = min(PARTS, max(1, len(values)))
    size = len(values) // parts
    numbers, rest = values.double().split([parts * size, len(values) - parts * size])
    sums = torch.cat([numbers.view(parts, size) @ torch.linspace(1, 2, size, dtype=torch.float64), rest])
    return zlib.crc32(values.view(torch.uint8).numpy().data), sums.nan_to_num(0, 0, 0)


def sums_by_sample(values: Any, rows: int) -> Any:
    """(rows, 2): two sums over what each of `rows` samples has in `values`. None: nothing is by samples."""
    plain = [t for t in tensors_in(values) if not (isinstance(t, DTensor) or is_of_transform(t))]
    fitting = [t for t in plain if t.layout == torch.strided and t.numel() and t.dim() and len(t) % rows == 0]
    if not fitting:
        return None
    flat = torch.cat([whole(tensor).double().cpu().reshape(rows, -1) for tensor in fitting], 1)
    weighted = flat * torch.linspace(1, 2, flat.shape[1], dtype=torch.float64)
    return torch.stack([weighted.sum(1), weighted.abs().sum(1)], 1) / flat.shape[1]


def trace_in(folder: Path) -> Trace:
    """Of all ranks of a run: their samples, in the order of their sums; of what several have, that of the first one;
    and what was logged."""
    ranks: list[Trace] = [torch.load(path, weights_only=True) for path in sorted(folder.glob("trace_*.pt"))]
    found = {key: value for trace in reversed(ranks) for key, value in trace.items()}
    for key in [key for key in found if key[1] in BY_SAMPLE]:
        found[key] = 0, torch.cat([trace[key][1] for trace in ranks if key in trace])
    samples = {step: values for (step, stage, _), (_, values) in found.items() if stage == "samples"}
    for key in [key for key in found if key[1] in BY_SAMPLE]:
        values, keys = found[key][1], samples[key[0]]
        found[key] = 0, values[np.lexsort((*values.T, *keys.T))] if len(values) == len(keys) else values[:0]
    for step, tag, value in read_rows(folder / "metrics.csv"):
        stage = "loss" if tag == "train/running_loss" else "evaluation" if tag.startswith(("val/", "test/")) else ""
        found |= {(step, stage, tag): kept(torch.tensor([value], dtype=torch.float64))} if stage else {}
    return found


Parting = tuple[int, str, list[str], float]
"""The step and the stage in which two runs part, the names that are apart there, and how far they are at most."""


def compare(one: Trace, other: Trace, tolerance: float, steps: int | None) -> tuple[Parting | None, float]:
    """(where another run parts from `one` in its first `steps` updates, else None; how far its results are apart).

    tolerance: relative; 0: the bits are compared.
    """
    taken = set(sorted({step for step, stage, _ in other if stage == "weights"})[:steps])
    places = {key[:2] for key in one} & {key[:2] for key in other}  # which both have come to
    largest, far = defaultdict[tuple[int, str], float](float), dict[tuple[int, str, str], float]()
    for key, (_, sums) in one.items():
        largest[key[:2]] = max(largest[key[:2]], float(sums.abs().max()) if sums.numel() else 0.0)
    for key in [key for key in one | other if key[0] in taken and key[:2] in places]:
        stage = key[1]
        (checksum, own), (other_checksum, theirs) = one.get(key, (0, NOTHING)), other.get(key, (0, NOTHING))
        if own.shape != theirs.shape:  # a layer may be called for some shares of a batch
            far[key] = math.inf if stage in OF_MODEL else 0.0
        elif checksum == other_checksum and torch.equal(own, theirs):
            far[key] = 0.0
        else:
            floor = max(FLOORS.get(stage, 0.0) * largest[key[:2]], float(own.abs().max()), 1e-30)
            far[key] = max(float((theirs - own).abs().max()) / floor, 0.0 if tolerance else 1e-300)
    apart = {key: distance for key, distance in far.items() if not distance <= tolerance}
    first = min((step for step, stage, _ in apart if stage in RESULTS), default=None)
    if first is None:
        return None, max((distance for key, distance in far.items() if key[1] in RESULTS), default=0.0)
    stage = min((stage for step, stage, _ in apart if step == first), key=STAGES.index)
    found = {name: distance for (step, of, name), distance in apart.items() if (step, of) == (first, stage)}
    return (first, stage, [*found], max(found.values())), 0.0
