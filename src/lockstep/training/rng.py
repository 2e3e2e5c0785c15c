"""What a step draws: seeds that depend on the place in the run alone, and draws that belong to samples.

A rank that computes some rows of a global batch draws what one process would have drawn for these rows, so dropout is
the same on any number of ranks. To that end `SampleDraws` looks at torch's functions that draw, and fills tensors whose
first dimension, or second one, is the batch. A model needs no change.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.compat import dispatch_mode, gamma_functions
from lockstep.data.loader import LoadedPart
from lockstep.data.partition import fold_in, seed_numpy_and_random

BLOCKS = 8  # of a global batch, at most: each is drawn from a seed of its own
BLOCK_SIZE = 16384  # numbers in a block, at least: a call takes as long as these
FILLERS = ("bernoulli_", "uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_")
OF_TORCH = """
rand randn randint rand_like randn_like randint_like randperm bernoulli normal multinomial poisson binomial
dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout
feature_alpha_dropout_ native_dropout rrelu rrelu_ lstm gru rnn_tanh rnn_relu
"""
OF_LAYERS = """
dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax
fractional_max_pool2d fractional_max_pool3d scaled_dot_product_attention multi_head_attention_forward
"""
MAY_DRAW = {
    *(getattr(torch, name) for name in OF_TORCH.split()),
    *(getattr(F, name) for name in OF_LAYERS.split()),
    *(getattr(Tensor, name) for name in (*FILLERS, "bernoulli", "multinomial")),
    *gamma_functions(),
}
"""Their operations are looked at one by one, which takes some microseconds for each."""
BATCH_DIMENSIONS = {  # those of what they draw inside, if not the first or the second
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), (1,)),
    F.multi_head_attention_forward: (0,),
}


UNWATCHED = nullcontext()


class Draws:
    """Seeds torch, numpy and random in each step, the same on all ranks.

    by_sample: whether draws belong to samples. Else each part of a batch has its own: of a compiled model, and where
        several ranks compute the same samples.
    """

    def __init__(self, seed: int, device: torch.device, by_sample: bool) -> None:
        self.seed, self.by_sample, self.samples = seed, by_sample, SampleDraws()
        index = device.index or 0
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[index])
        self.is_mps = device.type == "mps"
        self.is_watched, self.step, self.step_seed = True, 0, 0

    @property
    def has_drawn(self) -> bool:
        return self.samples.has_drawn

    def restore(self, has_drawn: bool) -> None:
        """Go on from a snapshot in the middle of an epoch: the same draws belong to samples as without the stop."""
        self.is_watched = self.samples.has_drawn = has_drawn

    def begin_epoch(self) -> None:
        self.is_watched = True

    def begin_step(self, step: int) -> None:
        """step: counted from 0."""
        self.step, self.step_seed = step, fold_in(self.seed, step)

    def of_part(self, part: LoadedPart, count: int) -> AbstractContextManager[Any]:
        """The block in which `part` of a batch of `count` samples is passed forward and backward.

        numpy and random give all parts the same numbers: one that decides about a layer, or mixes a batch, is that of
        one process.
        """
        seed_numpy_and_random(self.step_seed)
        if not self.by_sample:
            self.set_seed(fold_in(self.seed, self.step, part.number))
            return UNWATCHED
        self.set_seed(self.step_seed)
        return self.samples.of(part.start, len(part.numbers), count) if self.is_watched else UNWATCHED

    def end_step(self) -> None:
        """A model that has drawn nothing is not looked at until the next epoch begins."""
        self.is_watched = self.samples.has_drawn

    def set_seed(self, seed: int) -> None:
        """torch.manual_seed does this too, and takes 0.5 ms where torch could use a GPU."""
        for generator in self.generators:
            generator.manual_seed(seed)
        if self.is_mps:
            torch.mps.manual_seed(seed)


class SampleDraws(TorchFunctionMode):
    """Inside the block, draws belong to the samples from `start` to `start + rows` of a global batch of `count`.

    A single number, which may decide about a layer, and noise of a weight are the same on all ranks, as in one process.
    What else has no dimension of the batch is drawn by each rank for itself: mode=check names what depends on it.
    Each draw takes a seed from torch's generator, which is seeded alike on all ranks. So checkpointed blocks draw the
    same again.

    has_drawn: an attribute, whether anything was drawn yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn, self.operators = False, _Operators(self)
        self.generators: dict[torch.device, torch.Generator] = {}

    def of(self, start: int, rows: int, count: int) -> "SampleDraws":
        self.start, self.rows, self.count = start, rows, count
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and args[0].requires_grad:  # checkpointed blocks draw in it
            gradient = args[1] if len(args) > 1 else kwargs.pop("gradient", None)
            with self:  # of an edge: with the tensor, torch would ask this again
                torch.autograd.backward(get_gradient_edge(args[0]), gradient, **kwargs)
            return None
        if func not in MAY_DRAW:
            return func(*args, **kwargs)
        self.of_weight = bool(args) and isinstance(args[0], Parameter)
        self.dimensions = BATCH_DIMENSIONS.get(func, (0, 1))
        with self.operators:
            return func(*args, **kwargs)

    def fill(self, tensor: Tensor, fill: Callable[[Tensor, torch.Generator], Any]) -> Tensor:
        """Fill `tensor` with this rank's rows of what `fill` would draw for the global batch. Returns it.

        fill: puts random numbers of a generator into a tensor (rows, ...).
        """
        seed, dimension = self.new_seed(), self._batch_dimension(tensor.shape)
        if dimension is None:
            is_shared = self.of_weight or tensor.numel() == 1
            fill(tensor, self._seeded(tensor.device, seed if is_shared else fold_in(seed, self.start)))
            return tensor
        rows = tensor.movedim(dimension, 0).unflatten(0, (self.rows, -1))
        blocks = min(BLOCKS, self.count, max(1, self.count * rows[:1].numel() // BLOCK_SIZE))
        edges = itertools.pairwise(self.count * number // blocks for number in range(blocks + 1))
        for number, (begin, end) in enumerate(edges):
            first, last = (min(max(0, edge - self.start), self.rows) for edge in (begin, end))
            if first < last:
                generator = self._seeded(tensor.device, fold_in(seed, number))
                whole = tensor.new_empty(end - begin, *rows.shape[1:])
                fill(whole, generator)
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

    def by_all(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """`func`, which draws the same on all ranks."""
        self.has_drawn = True
        return func(*args, **kwargs)

    def by_rank(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """`func`, whose draws differ between ranks, if it draws: an attention need not."""
        generators = [torch.default_generator, *torch.cuda.default_generators]
        seed = fold_in(self.new_seed(), self.start)
        states = [generator.get_state() for generator in generators]
        seeded = [generator.manual_seed(seed).get_state() for generator in generators]
        try:
            return func(*args, **kwargs)
        finally:
            for generator, state, before in zip(generators, states, seeded, strict=True):
                self.has_drawn |= not torch.equal(generator.get_state(), before)
                generator.set_state(state)

    def new_seed(self) -> int:
        return int(torch.randint(2**62, (), device="cpu"))

    def _seeded(self, device: torch.device, seed: int) -> torch.Generator:
        self.has_drawn = True
        if device not in self.generators:
            self.generators[device] = torch.Generator(device)
        return self.generators[device].manual_seed(seed)


class _Operators(dispatch_mode()):  # type: ignore[misc]
    """Answers those of torch's operators that draw, whichever function they are a part of."""

    def __init__(self, draws: SampleDraws) -> None:
        super().__init__()
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        match str(func.overloadpacket).removeprefix("aten."), args:
            case ("rand_like" | "randn_like") as name, (like,):
                return self._fill(torch.empty_like(like, **kwargs), "uniform_" if name == "rand_like" else "normal_")
            case ("rand" | "randn") as name, (size,):
                return self._fill(torch.empty(size, **kwargs), "uniform_" if name == "rand" else "normal_")
            case "randint_like", (like, *bounds):
                return self._fill(torch.empty_like(like, **kwargs), "random_", *bounds[:-1] or [0], bounds[-1])
            case "randint", (*bounds, size):
                kwargs = {"dtype": torch.int64, **kwargs}
                return self._fill(torch.empty(size, **kwargs), "random_", *bounds[:-1] or [0], bounds[-1])
            case "bernoulli", (Tensor() as probabilities,):
                draws = torch.empty_like(probabilities, memory_format=torch.contiguous_format)
                return (self._fill(draws, "uniform_") < probabilities).to(probabilities.dtype)
            case "bernoulli", (Tensor() as like, p):
                return self._fill(torch.empty_like(like), "bernoulli_", p)
            case "bernoulli_", (Tensor() as tensor, Tensor() as probabilities):
                draws = torch.empty(tensor.shape, device=tensor.device)
                return tensor.copy_(self._fill(draws, "uniform_") < probabilities)
            case "normal", (mean, std) if isinstance(mean, Tensor) or isinstance(std, Tensor):
                like = mean if isinstance(mean, Tensor) else std
                shape = torch.broadcast_shapes(*(value.shape for value in args if isinstance(value, Tensor)))
                return self._fill(like.new_empty(shape), "normal_") * std + mean
            case "normal", (mean, std, size):
                return self._fill(torch.empty(size, **kwargs), "normal_", mean, std)
            case "native_dropout", (input, p, True) if 0 < p < 1:
                mask = self._fill(torch.empty_like(input), "bernoulli_", 1 - p)
                return input * mask / (1 - p), mask.bool()
            case "rrelu_with_noise", (input, noise, lower, upper, True):
                slopes = self._fill(torch.empty_like(noise), "uniform_", lower, upper)
                return input * noise.copy_(slopes.where(input <= 0, 1))
            case name, (Tensor() as tensor, *numbers) if name in FILLERS:
                return self._fill(tensor, name, *numbers, **kwargs)
            case (("_sample_dirichlet" | "multinomial"), (Tensor() as row, *_)) if row.numel() == row.shape[-1]:
                return self.draws.by_all(func, *args, **kwargs)
            case "_standard_gamma", (Tensor() as number, *_) if number.numel() == 1:
                return self.draws.by_all(func, *args, **kwargs)
        return self.draws.by_rank(func, *args, **kwargs)

    def _fill(self, tensor: Tensor, name: str, *numbers: Any, **kwargs: Any) -> Tensor:
        def fill(part: Tensor, generator: torch.Generator) -> None:
            getattr(part, name)(*numbers, **kwargs | {"generator": generator})

        return self.draws.fill(tensor, fill)
