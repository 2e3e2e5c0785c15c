"""What a step draws: seeds that depend on the place in the run alone, and draws that belong to samples.

A rank that computes some rows of a global batch draws what one process would have drawn for these rows, so dropout is
the same on any number of ranks. To that end `Draws` looks at torch's functions that draw, and fills tensors whose
first dimension, or second one, is the batch. A model needs no change.
"""

import itertools
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.compat import dispatch_mode
from lockstep.data.loader import Batch, LoadedPart, Progress
from lockstep.data.partition import fold_in, seed_numpy_and_random, seeded

BLOCKS = 8  # of a global batch, at most: each is drawn from a seed of its own
BLOCK_SIZE = 16384  # numbers in a block, at least: a call takes as long as these
FILLS = {"rand": "uniform_", "randn": "normal_", "randint": "random_"}  # what makes a tensor, and what fills one
FILLERS = ("bernoulli_", "uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_")
WORDS = re.compile(
    "rand|normal|uniform|bernoulli|multinomial|poisson|binomial|exponential|cauchy|geometric|gamma|dirichlet|"
    "dropout|rrelu|lstm|gru|rnn|attention|gumbel|fractional"
)
# Their operations are looked at one by one, which takes some microseconds for each.
NAMED = (getattr(place, name) for place in (torch, F, Tensor) for name in dir(place) if WORDS.search(name))
MAY_DRAW = {function for function in NAMED if callable(function)}
BATCH_DIMENSIONS = {  # those of what they draw inside, if not the first or the second
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), (1,)),
    F.multi_head_attention_forward: (0,),
}
UNWATCHED = nullcontext()
generator_of = cache(lambda device: torch.Generator(device))  # each draw seeds it


class Draws(TorchFunctionMode):
    """Seeds torch, numpy and random in each step, the same on all ranks. In the block of a part, draws belong to the
    samples from `start` to `start + rows` of a global batch of `count`. A single number, which may decide about a
    layer, and noise of a weight are the same on all ranks, as in one process. What else has no dimension of the batch
    is drawn by each rank for itself: mode=check names what depends on it. Each draw takes a seed from torch's
    generator, which is seeded alike on all ranks: checkpointed blocks draw the same. by_sample: False: torch's draws
    are those of a part: of a compiled model, and where several ranks compute the same samples. A model that has drawn
    nothing yet is looked at in the first step of an epoch alone."""

    def __init__(self, seed: int, device: torch.device, by_sample: bool, progress: Progress) -> None:
        super().__init__()
        self.seed, self.by_sample, self.is_mps, self.progress = seed, by_sample, device.type == "mps", progress
        self.operators = _Operators(self)
        self.seeded_each_step = [torch.default_generator]
        if device.type == "cuda":
            self.seeded_each_step.append(torch.cuda.default_generators[device.index or 0])

    def of_part(self, part: LoadedPart, batch: Batch) -> AbstractContextManager[Any]:
        """The block in which `part` of `batch` is passed forward and backward. numpy and random give all parts the
        numbers of one process, which may decide about a layer, or mix a batch."""
        seed = fold_in(self.seed, self.progress.step)
        seed_numpy_and_random(seed)
        if not self.by_sample:
            seed = fold_in(self.seed, self.progress.step, part.number)
        for generator in self.seeded_each_step:  # torch.manual_seed takes 0.5 ms where torch could use a GPU
            generator.manual_seed(seed)
        if self.is_mps:
            torch.mps.manual_seed(seed)
        if self.by_sample and (batch.number == 0 or self.progress.has_drawn):
            self.start, self.rows, self.count = part.start, len(part.numbers), batch.count
            return self
        return UNWATCHED

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and args[0].requires_grad:  # checkpointed blocks draw in it
            gradient = args[1] if len(args) > 1 else kwargs.pop("gradient", None)
            with self:  # of an edge: with the tensor, torch would ask this again
                return torch.autograd.backward(get_gradient_edge(args[0]), gradient, **kwargs)
        if func not in MAY_DRAW:
            return func(*args, **kwargs)
        self.of_weight = bool(args) and isinstance(args[0], Parameter)
        self.dimensions = BATCH_DIMENSIONS.get(func, (0, 1))
        with self.operators:
            return func(*args, **kwargs)

    def fill(self, tensor: Tensor, name: str, *numbers: Any, **options: Any) -> Tensor:
        """`tensor` with this rank's rows of what its method `name` would draw into one of the global batch."""
        self.progress.has_drawn, seed, dimension = True, self.new_seed(), self._batch_dimension(tensor.shape)
        generator = generator_of(tensor.device)
        draw = methodcaller(FILLS.get(name.removesuffix("_like"), name), *numbers, **options, generator=generator)
        if dimension is None:
            generator.manual_seed(seed if self.of_weight or tensor.numel() == 1 else fold_in(seed, self.start))
            draw(tensor)
            return tensor
        rows = tensor.movedim(dimension, 0).unflatten(0, (self.rows, -1))
        blocks = min(BLOCKS, self.count, max(1, self.count * rows[:1].numel() // BLOCK_SIZE))
        edges = itertools.pairwise(self.count * number // blocks for number in range(blocks + 1))
        for number, (begin, end) in enumerate(edges):
            first, last = (min(max(0, edge - self.start), self.rows) for edge in (begin, end))
            if first < last:
                whole = tensor.new_empty(end - begin, *rows.shape[1:])
                generator.manual_seed(fold_in(seed, number))
                draw(whole)
                rows[first:last] = whole[self.start + first - begin :][: last - first]
        return tensor

    def _batch_dimension(self, shape: Sequence[int]) -> int | None:
        """Which dimension counts samples. The first may have several rows of each: heads of an attention, windows."""
        if self.of_weight or not self.rows or (len(shape) < 2 and sum(shape) == 1) or not shape:
            return None
        for dimension in self.dimensions:
            if shape[dimension : dimension + 1] == (self.rows,):
                return dimension
        return 0 if 0 in self.dimensions and shape[0] and shape[0] % self.rows == 0 else None

    def by_rank(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """`func`, whose draws differ between ranks, if it draws: an attention need not."""
        generators = [torch.default_generator, *torch.cuda.default_generators]
        with seeded(fold_in(self.new_seed(), self.start)):
            before = [generator.get_state() for generator in generators]
            result = func(*args, **kwargs)
            now = [generator.get_state() for generator in generators]
        self.progress.has_drawn |= not all(map(torch.equal, before, now))
        return result

    def new_seed(self) -> int:
        return int(torch.randint(2**62, (), device="cpu"))


class _Operators(dispatch_mode()):  # type: ignore[misc]
    """Answers those of torch's operators that draw, whichever function they are a part of."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, fill = kwargs or {}, self.draws.fill
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        name = str(func.overloadpacket).removeprefix("aten.")
        match name, args:
            case (("rand_like" | "randn_like" | "randint_like"), (like, *bounds)):
                return fill(torch.empty_like(like, **kwargs), name, *bounds)
            case (("rand" | "randn" | "randint"), (*bounds, size)):
                kwargs = {"dtype": torch.int64, **kwargs} if name == "randint" else kwargs
                return fill(torch.empty(size, **kwargs), name, *bounds)
            case "bernoulli", (Tensor() as p,):
                return (fill(torch.empty(p.shape, device=p.device), "rand") < p).to(p.dtype)
            case "normal", (mean, std, *size):
                tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
                shape = size[0] if size else torch.broadcast_shapes(*(value.shape for value in tensors))
                drawn = tensors[0].new_empty(shape) if tensors else torch.empty(shape, **kwargs)
                return fill(drawn, "randn") * std + mean
            case "native_dropout", (input, p, True) if 0 < p < 1:
                mask = fill(torch.empty_like(input), "bernoulli_", 1 - p)
                return input * mask / (1 - p), mask.bool()
            case _, (Tensor() as tensor, *numbers) if name in FILLERS:
                return fill(tensor, name, *numbers, **kwargs)
            case (("_sample_dirichlet" | "multinomial" | "_standard_gamma"), (row, *_)):
                # One draw, as MixUp's, is the same on all ranks: of a row of weights, or of one number.
                if row.numel() == (1 if name == "_standard_gamma" else row.shape[-1]):
                    self.draws.progress.has_drawn = True
                    return func(*args, **kwargs)
        return self.draws.by_rank(func, *args, **kwargs)
