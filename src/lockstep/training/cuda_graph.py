"""`step=cuda_graph`: a whole step is recorded once and then replayed, so that the host's calls cost nothing."""

from typing import Any

import torch
from torch import Tensor

from lockstep.config.schema import Count
from lockstep.data.loader import Batch, LoadedPart
from lockstep.data.source import map_tensors, tensors_in
from lockstep.errors import ConfigError
from lockstep.training.rng import Draws
from lockstep.training.step import Step


class GraphedStep(Step):
    """The kernels of an ordinary step in a torch.cuda.CUDAGraph, replayed with the samples and rates of each step. What
    Python decides in a step is decided once: a layer that is dropped now and then, a count in an attribute. Draws are
    those of a rank. A batch of another size, and the first `warmup` ones, are computed without the graph."""

    def __init__(self, *, warmup: Count, **parts: Any) -> None:
        super().__init__(**parts)
        device, groups = self.strategy.world.device, self.optimizer.param_groups
        if device.type != "cuda" or self.strategy.world.size > 1:
            raise ConfigError("step=cuda_graph records what one rank computes on a GPU; type step=default")
        if self.scales or self.skips:  # the host would have to wait for a value
            raise ConfigError("step=cuda_graph cannot leave out updates; type watch.nan=stop trainer.precision=bf16")
        self.draws = Draws(self.draws.seed, device, False, self.progress)
        for group in groups:
            if "capturable" in group:
                group["capturable"] = True
        self.rates = torch.zeros(len(groups), device=device).unbind()  # of the groups: plain numbers would be recorded
        self.stream, self.warmup, self.warm = torch.cuda.Stream(device), warmup, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.recorded: list[LoadedPart] = []  # whose tensors the graph reads
        self.measured: list[Any] = []  # what the graph gives to the meter
        self.norm: Tensor | None = None

    def __call__(self, batch: Batch) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate.fill_(group["lr"])
        if self.warm < self.warmup or (self.graph is not None and _forms(batch.parts) != _forms(self.recorded)):
            self.warm += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                super().__call__(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self._record(batch)
        for now, place in zip(tensors_in(batch.parts), tensors_in(self.recorded), strict=True):
            place.copy_(now, non_blocking=True)
        for part in batch.parts:
            self.draws.of_part(part, batch)
        assert self.graph is not None
        self.graph.replay()
        for values, counts in self.measured:
            self.meter.add(self.progress.step + 1, [value.clone() for value in values], counts)
        self.grad_norm = None if self.norm is None else self.norm.clone()
        self.schedule(self.progress.step + self.progress.ahead + 1)

    def _record(self, batch: Batch) -> None:
        """Nothing is computed yet."""
        self.recorded = [LoadedPart(*map_tensors(torch.clone, part)) for part in batch.parts]
        weight = self.begin(batch)
        if self.pending is not None:
            what = "step=cuda_graph replays a step, and this task counts targets by their values"
            raise ConfigError(f"{what}, another number in each step; type step=default")
        self.meter.flush()
        self.optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for part in self.recorded:
                self.strategy.forward_backward(part, self.loss, weight, part is self.recorded[-1])
            self.update()
        self.norm, self.measured = self.grad_norm, [entry[1:] for entry in self.meter.waiting]
        self.meter.discard(self.progress.step + 1)


def _forms(parts: list[LoadedPart]) -> list[Any]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(parts)]
