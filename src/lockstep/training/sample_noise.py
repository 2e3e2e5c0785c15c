"""What a forward pass draws belongs to the samples, so that dropout is the same on any number of ranks.

A rank that computes some rows of a global batch draws what one process would have drawn for these rows. To that end
`SampleNoise` looks at torch's functions that draw (dropout of every kind, also that of an attention, `bernoulli_`,
`rand_like`, `torch.randn(len(x), 8)`, ...), and fills tensors of which one dimension is the batch itself. A model needs
no change.

All ranks seed torch's generator alike in each step, and each draw takes a seed of its own from it. So checkpointed
blocks (torch.utils.checkpoint) draw the same again. The global batch is cut into a few blocks of rows, each drawn from
(seed of the draw, block): a rank draws the blocks that its rows lie in, and no others.
"""

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.compat import dispatch_mode, gamma_functions
from lockstep.data.partition import fold_in

log = logging.getLogger(__name__)

OF_LIBRARIES = (str(Path(torch.__file__).parent), __file__)  # beginnings of the names of files
BLOCKS = 8  # of a global batch, at most
BLOCK_SIZE = 16384  # numbers in a block, at least: a call takes as long as these
TOGETHER = 16  # samples of an evaluation whose numbers are drawn at once, whatever the batches and ranks are
FILLERS = ["bernoulli_", "uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"]
OF_TORCH = """
rand randn randint rand_like randn_like randint_like randperm bernoulli normal multinomial poisson binomial
dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout
feature_alpha_dropout_ native_dropout rrelu rrelu_
"""
OF_LAYERS = """
dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax
fractional_max_pool2d fractional_max_pool3d
"""
DIMENSIONS: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((getattr(torch, name) for name in OF_TORCH.split()), (0, 1)),
    **dict.fromkeys((getattr(F, name) for name in OF_LAYERS.split()), (0, 1)),
    **dict.fromkeys((getattr(Tensor, name) for name in [*FILLERS, "bernoulli", "multinomial"]), (0, 1)),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), (1,)),
    F.scaled_dot_product_attention: (0, 1),  # of queries without heads, it is the second
    F.multi_head_attention_forward: (0,),
    **dict.fromkeys(gamma_functions(), ()),
}
"""{a function that may draw: which dimensions of what it draws may be the batch}. The operations of these functions are
looked at one by one, which takes some microseconds for each."""


class SampleNoise(TorchFunctionMode):
    """Inside the block, draws belong to the samples from `start` to `start + rows` of a global batch of `count`.

    A single number, which may decide about a layer, and noise of a parameter are the same on all ranks, as in one
    process; in an evaluation they belong to a rank's batch. What else has no dimension of the batch, or cannot be cut
    by it, is drawn by each rank for itself.

    is_needed: an attribute, whether anything was drawn yet, or the first block of an epoch has not ended. Models that
    draw nothing need not pay the microsecond that a look at each function takes.
    drawn_by_rank: an attribute, what is said of the first call of which each rank has drawn its own; or "".
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn, self.drawn_by_rank, self.is_needed = False, "", True
        self.draws = _Draws(self)
        self.calls: dict[tuple[str, int], bool] = {}  # {where (N,) is drawn: whether it is for each sample}
        self.generators: dict[torch.device, torch.Generator] = {}

    def of(self, start: int, rows: int, count: int) -> Self:
        self.start, self.rows, self.stride, self.count, self.together = start, rows, 1, count, 0
        return self

    def of_evaluation(self, samples: range) -> Self:
        """Inside the block, draws belong to these samples of a data set."""
        self.start, self.rows, self.stride, self.together = samples.start, len(samples), samples.step, TOGETHER
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # else the pass has not come to its end
            self.is_needed = self.has_drawn
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def begin_epoch(self, draws: bool | None, is_begun: bool) -> None:
        """Watch the first block of an epoch, and all of a model that `draws`, of which None says that nobody knows.

        is_begun: whether some steps of it are done, by a run that was stopped.
        """
        self.has_drawn, self.is_needed = bool(draws), draws is not False or not is_begun

    @contextmanager
    def unwatched(self, is_part: bool) -> Iterator[None]:
        """In the block nothing is looked at, as earlier ones have drawn nothing. If it draws, later ones are watched.

        is_part: whether it computes a part of a batch.
        """
        before = _states()
        yield
        if _states() == before:
            return
        self.has_drawn = self.is_needed = True
        if is_part:
            log.warning(
                "the model draws random numbers, and drew none when this epoch began: in this step all parts of the "
                "batch draw the same ones; for numbers of each sample's own, draw from the first step of an epoch on"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and args[0].requires_grad:  # checkpointed blocks draw in it
            with self:  # of an edge: with the tensor, torch would ask this again
                torch.autograd.backward(get_gradient_edge(args[0]), kwargs.pop("gradient", None), **kwargs)
            return None
        dimensions = DIMENSIONS.get(func)
        if dimensions is None:
            return func(*args, **kwargs)
        self.dimensions, self.of_weight = dimensions, bool(args) and isinstance(args[0], Parameter)
        with self.draws:
            return func(*args, **kwargs)

    def new_seed(self) -> int:
        return int(torch.randint(2**62, (), device="cpu"))

    def by_rank(self, is_shared: bool, func: Any, *args: Any, **kwargs: Any) -> Any:
        """`func`, whose draws differ between ranks but for `is_shared`, if it draws: an attention need not."""
        seed = self.new_seed() if is_shared else fold_in(self.new_seed(), self.start)
        generators = _generators()
        states = [generator.get_state() for generator in generators]
        seeded = [generator.manual_seed(seed).get_state() for generator in generators]
        try:
            return func(*args, **kwargs)
        finally:
            has_drawn = False
            for generator, before, state in zip(generators, seeded, states, strict=True):
                has_drawn |= not torch.equal(generator.get_state(), before)
                generator.set_state(state)
            self._note(has_drawn, is_shared)

    def _note(self, has_drawn: bool, is_shared: bool) -> None:
        self.has_drawn |= has_drawn
        if has_drawn and not is_shared and not self.drawn_by_rank:
            self.drawn_by_rank = (
                f"{_call_of_user()[0]} draws random numbers that belong to no sample, other ones for each part of a "
                f"batch, so the result depends on the number of ranks; draw a single number, or some for each sample "
                f"in a first dimension as long as the batch, or type strategy=virtual_ranks"
            )

    def batch_dimension(self, shape: Sequence[int]) -> int | None:
        """Which dimension counts samples. The first may have several rows of each: heads of an attention, windows."""
        if self.of_weight or not self.rows:
            return None
        if len(shape) < 2 and math.prod(shape) in (1, self.rows):
            return 0 if shape and 0 in self.dimensions and self._is_of_samples(shape[0]) else None
        for dimension in self.dimensions:
            if dimension < len(shape) and shape[dimension] == self.rows:
                return dimension
        return 0 if 0 in self.dimensions and shape[0] and shape[0] % self.rows == 0 else None

    def _is_of_samples(self, numbers: int) -> bool:
        """Whether (numbers,), which is 1 or as many as samples, are for each of them.

        A share of one sample does not show it: then what the same call has drawn for more samples does.
        """
        call = _call_of_user()
        if self.rows > 1:
            self.calls[call] = numbers > 1
        elif call not in self.calls:  # perhaps a decision about a layer, which must be the same on all ranks
            warn_of_one(call[0])
        return self.calls.get(call, False)

    def fill(self, tensor: Tensor, fill: Callable[[Tensor, torch.Generator], Any]) -> None:
        """Fill `tensor` with this rank's rows of what `fill` would draw for the global batch.

        fill: puts random numbers of a generator into a tensor (rows, ...).
        """
        dimension, seed = self.batch_dimension(tensor.shape), self.new_seed()
        is_shared = (self.of_weight or tensor.numel() == 1) and not self.together
        self._note(True, is_shared or dimension is not None)
        if dimension is None:
            fill(tensor, self.seeded(tensor.device, seed if is_shared else fold_in(seed, self.start)))
            return
        rows = tensor.movedim(dimension, 0).unflatten(0, (self.rows, -1))
        for number, (begin, end) in self._blocks(rows[:1].numel()):
            first, last = (min(max(0, -((self.start - edge) // self.stride)), self.rows) for edge in (begin, end))
            if first < last:
                generator = self.seeded(tensor.device, fold_in(seed, number))
                own = rows[first:last]
                if last - first == end - begin and own.is_contiguous():
                    fill(own, generator)
                else:
                    whole = tensor.new_empty(end - begin, *rows.shape[1:])
                    fill(whole, generator)
                    own.copy_(whole[self.start + self.stride * first - begin :: self.stride][: last - first])

    def _blocks(self, numbers: int) -> Iterable[tuple[int, tuple[int, int]]]:
        """(number, (first sample, the one behind the last)) of blocks in which this rank has rows, and of others.

        numbers: that are drawn for a sample.
        """
        if self.together:
            last = self.start + self.stride * (self.rows - 1)
            found = range(self.start // self.together, last // self.together + 1)
            return [(number, (number * self.together, (number + 1) * self.together)) for number in found]
        blocks = min(BLOCKS, self.count, max(1, self.count * numbers // BLOCK_SIZE))
        return enumerate(itertools.pairwise(self.count * number // blocks for number in range(blocks + 1)))

    def seeded(self, device: torch.device, seed: int) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device)
        return self.generators[device].manual_seed(seed)


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *torch.cuda.default_generators]


def _states() -> list[bytes]:
    """They are the host's, also of a GPU's generator."""
    return [generator.get_state().numpy().tobytes() for generator in _generators()]


def _call_of_user() -> tuple[str, int]:
    """("file:line", place in the code) of the call that draws, outside of torch."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OF_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", frame.f_lasti


@cache
def warn_of_one(line: str) -> None:
    """A line in the log, once."""
    log.warning(
        "%s draws one number for a share of one sample, and all ranks draw the same one; if it belongs to the sample, "
        "draw the shape (N, 1)",
        line,
    )


class _Draws(dispatch_mode()):  # type: ignore[misc]
    """Answers those of torch's operations that draw, whichever function they are a part of."""

    def __init__(self, noise: SampleNoise) -> None:
        super().__init__()
        self.noise = noise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        filled = self._filled(func.overloadpacket, args, kwargs)
        if filled is not None:
            return filled
        return self.noise.by_rank(_is_one(func.overloadpacket, args) and not self.noise.together, func, *args, **kwargs)

    def _filled(self, packet: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operation returns. None if its draws are no numbers that fill a tensor."""
        match str(packet).removeprefix("aten."), args:
            case "rand_like", (like,):
                return self._fill(torch.empty_like(like, **kwargs), "uniform_")
            case "randn_like", (like,):
                return self._fill(torch.empty_like(like, **kwargs), "normal_")
            case "randint_like", (like, *bounds):
                return self._fill(torch.empty_like(like, **kwargs), "random_", *bounds[:-1] or [0], bounds[-1])
            case "rand", (size,):
                return self._fill(torch.empty(size, **kwargs), "uniform_")
            case "randn", (size,):
                return self._fill(torch.empty(size, **kwargs), "normal_")
            case "randint", (*bounds, size):
                kwargs = {"dtype": torch.int64, **kwargs}
                return self._fill(torch.empty(size, **kwargs), "random_", *bounds[:-1] or [0], bounds[-1])
            case "bernoulli", (probabilities,):
                draws = torch.empty_like(probabilities, memory_format=torch.contiguous_format)
                return (self._fill(draws, "uniform_") < probabilities).to(probabilities.dtype)
            case "bernoulli", (like, p):
                return self._fill(torch.empty_like(like), "bernoulli_", p)
            case "bernoulli_", (tensor, Tensor() as probabilities):
                return tensor.copy_(
                    self._fill(torch.empty(tensor.shape, device=tensor.device), "uniform_") < probabilities
                )
            case "normal", (mean, std) if isinstance(mean, Tensor) or isinstance(std, Tensor):
                shape = torch.broadcast_shapes(*(value.shape for value in args if isinstance(value, Tensor)))
                like = mean if isinstance(mean, Tensor) else std
                return self._fill(like.new_empty(shape), "normal_") * std + mean
            case "normal", (mean, std, size):
                return self._fill(torch.empty(size, **kwargs), "normal_", mean, std)
            case "rrelu_with_noise", (input, slopes, lower, upper, True):
                slopes.copy_(self._fill(torch.empty_like(input), "uniform_", lower, upper).where(input <= 0, 1))
                return input * slopes
            case "native_dropout", (input, p, True) if 0 < p < 1:
                mask = self._fill(torch.empty_like(input), "bernoulli_", 1 - p)
                return input * mask / (1 - p), mask.bool()
            case name, (tensor, *numbers) if name in FILLERS:
                return self._fill(tensor, name, *numbers, **kwargs)
        return None

    def _fill(self, tensor: Tensor, name: str, *numbers: Any, **kwargs: Any) -> Tensor:
        self.noise.fill(
            tensor, lambda part, generator: getattr(part, name)(*numbers, **kwargs | {"generator": generator})
        )
        return tensor


def _is_one(packet: Any, args: Any) -> bool:
    """Whether an operation draws one number, or one vector of a Dirichlet distribution, for what has no rows."""
    match str(packet).removeprefix("aten."), args:
        case "_standard_gamma" | "poisson" | "binomial", (Tensor() as parameter, *_):
            return parameter.numel() == 1
        case "_sample_dirichlet", (Tensor() as parameter, *_):
            return parameter.numel() == parameter.shape[-1]
        case "multinomial", (Tensor() as weights, 1, *_):
            return weights.dim() == 1
    return False
