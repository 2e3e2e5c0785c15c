"""What a run of mode=check computes, stage by stage, and where two such runs part.

The run is an ordinary training. A callback sees it, by the hooks that PyTorch has for all modules and all optimizers.
"""

import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Subset

from lockstep.compat import is_of_transform
from lockstep.config.record import ConfigRecord
from lockstep.config.schema import RunConfig
from lockstep.data.source import DataSource, Splits, class_numbers, tensors_in, unwrapped
from lockstep.data.split import hold_out
from lockstep.distributed import signals
from lockstep.loggers.base import Logger
from lockstep.preflight import Parts
from lockstep.snapshots.files import list_snapshots
from lockstep.strategies.base import local_part
from lockstep.training.callbacks import Callback
from lockstep.training.run import Run

BY_SAMPLE = "samples", "layers"  # stages to which each sample adds
NOISE = 0.7  # eps to this power, of the largest gradient: what is smaller is rounding
EVALUATED = 9  # samples of an evaluation

Trace = dict[tuple[int, str, str], Tensor]
"""{(step, stage, name): (a number, two sums)}, in the order of their events. The number is of the samples in "samples"
and "layers", and a checksum of all bits in "start", "loss", "gradients", "weights" (and buffers) and "evaluation". Of
step 0 by name alone: "bits", in which a part of the net computes; weights "held" by an optimizer, and "beside" the
model."""
NOTHING = torch.zeros(3, dtype=torch.float64)


@dataclass(kw_only=True)
class Few(DataSource):
    """So many samples of a run's data. hold: what `hold_out` takes after the data; None: nothing is held out."""

    source: Any
    hold: Any
    samples: int

    def prepare(self) -> None:
        self.source.prepare()

    def splits(self) -> Splits:
        train, test, val = self.source.splits()
        if val is None and self.hold is not None:
            train, val = hold_out(train, *self.hold)
        if getattr(unwrapped(train)[0], "draws", None):
            unwrapped(train)[0].draws = self.samples
        return Splits(few(train, self.samples), few(test, EVALUATED), None if val is None else few(val, EVALUATED))


def few(data: Any, count: int) -> Any:
    """`count` samples at even distances. The largest class is there, as it may tell how many there are."""
    numbers, classes = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int), class_numbers(data)
    if classes is not None:
        numbers[-1] = int(classes.argmax())
    return Subset(data, np.unique(numbers))  # type: ignore[arg-type]  # an array is enough


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
