"""What a run of mode=check computes, stage by stage, and where two such runs part.

The run is an ordinary training. It is seen by the hooks that PyTorch has for all modules and all optimizers, and by its
own metrics.csv: nothing in a training knows of this file.
"""

import os
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer
from torch.utils.data import IterableDataset, Subset

from lockstep.compat import is_of_transform
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.data.build import class_numbers
from lockstep.data.source import DataSource, Splits, tensors_in, unwrapped
from lockstep.data.split import hold_out
from lockstep.loggers.csv_logger import read_rows
from lockstep.modes.train import Train
from lockstep.preflight import Parts
from lockstep.snapshots.files import list_snapshots, step_of

STAGES = ("start", "samples", "layers", "loss", "gradients", "weights", "evaluation")
RESULTS, BY_SAMPLE, WHOLE = STAGES[3:], STAGES[1:3], STAGES[4:6]  # RESULTS decide whether runs part, the others say why
FLOORS = {"layers": 1e-9, "loss": 1e-3, "gradients": 1e-3, "weights": 1e-3}  # of the largest value of the stage
NOISE = 0.7  # eps to this power, of the largest gradient: what is smaller is rounding
SKETCH = 2048  # numbers that are kept of a tensor

Kept = tuple[int, Tensor]
"""Of a tensor: a checksum of its bits, and sums of its values in float64, at most `SKETCH`."""
Trace = dict[int, dict[str, dict[str, Kept]]]
"""{step: {stage: {name: what is kept}}}. start: the weights before the first update. samples, layers: (n, 2), two sums
for each sample over the inputs, and over what a layer returned for it, in the order of calls. weights: with buffers."""
Facts = dict[str, Any]
"""coarse: the type of fewer bits than float64 in which a part of the net computes, or "". idle: weights without a
gradient in all steps, or with one of zeros. lost: weights that no optimizer has."""


@dataclass(kw_only=True)
class Few(DataSource):
    """So many samples of the data of a run. hold: arguments of `hold_out`; None: nothing is held out."""

    source: Any
    hold: Any
    samples: int
    evaluated: int

    def prepare(self) -> None:
        self.source.prepare()

    def splits(self) -> Splits:
        train, test, val = self.source.splits()
        if val is None and self.hold is not None:
            train, val = hold_out(train, **self.hold)
        val = None if self.hold is None else few(val, self.evaluated)
        return Splits(few(train, self.samples), few(test, self.evaluated), val)


def few(data: Any, count: int) -> Any:
    """`count` samples at even distances. The largest class is there, as it may tell how many there are."""
    if isinstance(data, IterableDataset):
        return FirstItems(data, count)
    numbers, classes = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int), class_numbers(data)
    if classes is not None:
        numbers[-1] = int(classes.argmax())
    whole, indices = unwrapped(Subset(data, np.unique(numbers)))  # type: ignore[arg-type]  # an array is enough
    if getattr(whole, "draws", None):
        whole = copy(whole)
        whole.draws = count
    return Subset(whole, indices)  # type: ignore[arg-type]


class FirstItems(IterableDataset[Any]):
    def __init__(self, data: Any, count: int) -> None:
        self.data, self.count = data, min(count, len(data))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.data, self.count)

    def __getattr__(self, name: str) -> Any:  # such as its classes
        return getattr(self.__dict__["data"], name)


def run(config: RunConfig, record: ConfigRecord, parts: Parts) -> Facts:
    """A rank trains, prints nothing, and leaves its trace in the run folder. It resumes from the oldest snapshot."""
    done = 0
    if config.resume is not None:
        snapshot = list_snapshots(Path(config.resume) / "snapshots")[-1]
        config, done = config.changed({"resume": str(snapshot)}), step_of(snapshot)
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    random.seed()  # as in the processes of a launcher that does not fork
    np.random.seed()
    recorder = Recorder(parts, done)
    with ExitStack() as hooks:
        hooks.callback(recorder.save, Path(config.run_dir))  # also of a run that fails
        hooks.enter_context(every_optimizer.register_optimizer_step_pre_hook(recorder.before_update))
        hooks.enter_context(every_optimizer.register_optimizer_step_post_hook(recorder.after_update))
        if not config.trainer.compile:  # which would compile the hooks, too
            hooks.enter_context(every_module.register_module_forward_pre_hook(recorder.before_forward))
            hooks.enter_context(every_module.register_module_forward_hook(recorder.after_forward))
        Train().work(config, record, parts)
    log = (Path(config.run_dir) / "train.log").read_text() if os.environ["RANK"] == "0" else ""
    return recorder.facts() | {"warnings": [*dict.fromkeys(re.findall(r"(?m)\[WARNING\] - (.*)", log))]}


class Recorder:
    """The trace of this rank."""

    def __init__(self, parts: Parts, done: int) -> None:
        self.strategy, self.step, self.rows, self.depth = parts.strategy, done, 0, 0
        self.trace: Trace = {}
        self.by_sample: dict[str, list[Tensor]] = {}
        self.names: dict[nn.Module, str] = {}
        self.optimized, self.learning, self.lost, self.coarse = set[int](), set[str](), dict[str, None](), ""

    def save(self, folder: Path) -> None:
        torch.save(self.trace, folder / f"trace_{os.environ['RANK']}.pt")

    def facts(self) -> Facts:
        trained = {name: weight for name, weight in self.strategy.model.named_parameters() if weight.requires_grad}
        lost = [*self.lost, *(name for name, weight in trained.items() if id(weight) not in self.optimized)]
        return {"coarse": self.coarse, "idle": [n for n in trained if n not in {*self.learning, *lost}], "lost": lost}

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module is getattr(self.strategy, "model", None) and module.training and torch.is_grad_enabled():
            self.names = {part: f"{name} ({type(part).__name__})".strip() for name, part in module.named_modules()}
            self.rows = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
            self.called: list[str] = []
            self._keep("samples", inputs)

    def after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self.names and module not in self.names and module.training and torch.is_grad_enabled():
            weights = [
                f"of {list(weight.shape)}" for weight in module.parameters(recurse=False) if weight.requires_grad
            ]
            self.lost |= dict.fromkeys(f"a weight {shape} of a {type(module).__name__}" for shape in weights)
        elif self.rows:
            self._keep(self.names[module], outputs)
            if module is self.strategy.model:
                self.rows = 0  # a checkpointed block computes again in the backward pass
                self._look_behind([tensor.grad_fn for tensor in tensors_in(outputs)])

    def _keep(self, name: str, values: Any) -> None:
        self.called.append(name)
        sums = sums_by_sample(values, self.rows) if self.rows else None
        if sums is not None:
            call = self.called.count(name)
            self.by_sample.setdefault(f"{name}, call {call}" if call > 1 else name, []).append(sums)

    def _look_behind(self, nodes: list[Any]) -> None:
        """Look in autograd's graph for another type than that of the run, and for weights that no module holds."""
        weights, seen = {id(weight): weight for weight in self.strategy.model.parameters()}, set()
        types = [weight.dtype for weight in weights.values() if weight.is_floating_point()]
        self.coarse = str(min(types, key=lambda one: torch.finfo(one).bits, default="")).removeprefix("torch.")
        while nodes and self.step < 2:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.name().startswith("ToCopy") and self.coarse == "float64":
                self.coarse = "float32"
            leaf = getattr(node, "variable", None)
            is_whole = not any(isinstance(weight, DTensor) for weight in weights.values())  # else it is another tensor
            if isinstance(leaf, nn.Parameter) and id(leaf) not in weights and is_whole:
                self.lost[f"a weight of {list(leaf.shape)}"] = None
            with suppress(RuntimeError):  # before torch 2.14 a function of the user's may not tell
                nodes += [following for following, _ in node.next_functions]

    @torch.no_grad()
    def before_update(self, optimizer: Any, *_: Any) -> None:
        self.optimized |= {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        self.depth += 1
        if self.depth > 1:  # an optimizer inside of another one
            return
        self.step += 1
        named = dict(self.strategy.model.named_parameters())
        gradients = {name: whole(weight.grad) for name, weight in named.items() if weight.grad is not None}
        self.learning |= {name for name, gradient in gradients.items() if gradient.any()}
        by_sample = {name: (0, torch.cat(sums)) for name, sums in self.by_sample.items()}
        self.trace[self.step] = {
            "start": {} if self.trace else {name: kept(weight) for name, weight in named.items()},
            "samples": {name: by_sample.pop(name) for name in ("samples",) if name in by_sample},
            "layers": by_sample,
            "gradients": {name: kept(gradient) for name, gradient in gradients.items()},
        }
        self.by_sample = {}
        # Of a gradient that is zero rounding leaves something, and an optimizer such as Adam makes a whole step of it.
        largest = max((float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()), default=0.0)
        for name, gradient in gradients.items():
            own = named[name].grad.to_local() if isinstance(named[name].grad, DTensor) else named[name].grad
            if own.layout == torch.strided and own.is_floating_point():
                own.masked_fill_(own.abs() < largest * torch.finfo(own.dtype).eps ** NOISE, 0)

    @torch.no_grad()
    def after_update(self, *_: Any) -> None:
        self.depth -= 1
        model = self.strategy.model
        if self.depth == 0:
            named = [*model.named_parameters(), *model.named_buffers()]
            self.trace[self.step]["weights"] = {name: kept(value) for name, value in named}


def whole(value: Tensor) -> Tensor:
    """All of a tensor that may be in parts, or sparse, as real numbers. Of one in parts a collective."""
    value = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    value = value if value.layout == torch.strided else value.to_dense()
    return torch.view_as_real(value) if value.is_complex() else value


def kept(value: Tensor) -> Kept:
    values = whole(value).cpu().contiguous().reshape(-1)
    numbers = torch.cat([values.double().nan_to_num(0, 0, 0), (~values.isfinite()).sum()[None]])
    if len(numbers) > SKETCH:
        rows = nn.functional.pad(numbers, (0, -len(numbers) % SKETCH)).view(SKETCH, -1)
        numbers = rows @ torch.linspace(1, 2, rows.shape[1], dtype=torch.float64)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes()), numbers


def sums_by_sample(values: Any, rows: int) -> Tensor | None:
    """(rows, 2): two sums over what each of `rows` samples has in `values`. None: nothing is by samples."""
    total = None
    for tensor in tensors_in(values):
        is_odd = isinstance(tensor, DTensor) or is_of_transform(tensor) or tensor.layout != torch.strided
        if is_odd or not tensor.numel() or not tensor.dim() or len(tensor) % rows:
            continue
        flat = whole(tensor).double().cpu().reshape(rows, -1)
        weighted = flat * torch.linspace(1, 2, flat.shape[1], dtype=torch.float64)
        sums = torch.stack([weighted.sum(1), weighted.abs().sum(1)], 1) / flat.shape[1]
        total = sums if total is None else 1.5 * total + sums
    return total


def traces_in(folder: Path) -> list[Trace]:
    """Of each rank. The first one has all samples, in the order of their sums, and what was logged."""
    ranks: list[Trace] = [torch.load(path, weights_only=True) for path in sorted(folder.glob("trace_*.pt"))]
    for step in set.intersection(*map(set, ranks)) if ranks else ():
        first = ranks[0][step]
        every = [{**rank[step].pop("samples"), **rank[step].pop("layers")} for rank in ranks]
        names = [name for name in every[0] if all(name in rank for rank in every)]
        sums = {name: torch.cat([rank[name][1] for rank in every]) for name in names}
        keys = sums.get("samples", torch.zeros(0, 2)).T.flip(0)
        ordered = {n: (0, v[np.lexsort((*v.T.flip(0), *keys))]) for n, v in sums.items() if len(v) == keys.shape[1]}
        first["samples"] = {name: ordered.pop(name) for name in ("samples",) if name in ordered}
        first["layers"] = ordered
    for step, tag, value in read_rows(folder / "metrics.csv"):
        stage = "loss" if tag == "train/running_loss" else "evaluation" if tag.startswith(("val/", "test/")) else ""
        if stage and ranks and step in ranks[0]:
            ranks[0][step].setdefault(stage, {})[tag] = kept(torch.tensor([value], dtype=torch.float64))
    return ranks


Parting = tuple[int, str, list[str], float]
"""The step and the stage in which two runs part, the names that are apart there, and how far they are at most."""


def compare(one: Trace, ranks: Sequence[Trace], tolerance: float, steps: int) -> tuple[Parting | None, float]:
    """(where another run parts from `one` in its first `steps` steps, else None; how far its results are apart).

    tolerance: relative; 0: the bits are compared.
    """
    most = 0.0
    for step in sorted(set.intersection(*map(set, ranks)))[:steps]:
        apart = {stage: distances(stage, one[step], [rank[step] for rank in ranks], tolerance) for stage in STAGES}
        far = {stage: {n: d for n, d in found.items() if not d <= tolerance} for stage, found in apart.items()}
        if any(far[stage] for stage in RESULTS):
            stage = next(stage for stage in STAGES if far[stage])
            return (step, stage, list(far[stage]), max(far[stage].values())), most
        most = max([most, *(distance for stage in RESULTS for distance in apart[stage].values())])
    return None, most


def distances(stage: str, one: dict[str, Any], ranks: Sequence[dict[str, Any]], tolerance: float) -> dict[str, float]:
    """{name: how far ranks are apart from `one`, relative to the largest value} in a stage of a step."""
    first, others = one.get(stage, {}), [rank.get(stage, {}) for rank in ranks]
    floor = FLOORS.get(stage, 0.0) * max((float(v.abs().max()) for _, v in first.values() if v.numel()), default=0.0)
    found = dict.fromkeys(first if stage in WHOLE and any(others) else (), float("inf"))
    found |= dict.fromkeys(
        (name for other in others for name in other if stage in WHOLE and name not in first), float("inf")
    )
    for name, (bits, values) in first.items():
        theirs = [other[name] for other in others if name in other]
        if theirs and (stage in WHOLE or all(v.shape == values.shape for _, v in theirs)):
            found[name] = max(distance(bits, values, *other, floor, tolerance) for other in theirs)
    return found


def distance(bits: int, values: Tensor, their_bits: int, theirs: Tensor, floor: float, tolerance: float) -> float:
    if values.shape != theirs.shape:
        return float("inf")
    if not values.numel() or (bits == their_bits and torch.equal(values, theirs)):
        return 0.0
    far = float((values - theirs).abs().max() / max(floor, float(values.abs().max()), 1e-30))
    return far if tolerance else max(far, 1e-300)
