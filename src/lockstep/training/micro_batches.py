"""In how many micro-batches a rank computes a global batch, and what becomes of a step that runs out of memory."""

import gc
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.failures.causes import OUT_OF_MEMORY
from lockstep.strategies.base import Strategy

log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and re.search(OUT_OF_MEMORY, str(error)) is not None


class MicroBatches:
    """Counts the micro-batches of a global batch. With `grows` they become twice as many where a pass runs out of
    memory on some rank: all ranks agree on it after each pass, and do the step again.

    The samples of the global batch, and so the numbers of the run up to rounding, stay what they are. Batch norm sees a
    micro-batch.

    count: now. redoes: whether the step is to be done again.
    """

    def __init__(self, strategy: Strategy, count: int, largest: int, grows: bool) -> None:
        """largest: with which each micro-batch of an ordinary step has a sample for each rank."""
        self.strategy, self.count, self.largest, self.grows = strategy, count, largest, grows
        self.redoes = False
        self.error: Exception | None = None
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """A step begins."""
        self.redoes = False
        if self.grows:
            self.buffers = [(buffer, buffer.clone()) for buffer in self.strategy.model.buffers()]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the block a micro-batch is passed forward and backward."""
        try:
            yield
        except Exception as error:
            if not (self.grows and is_out_of_memory(error)):
                raise
            self.error = error

    def ran_out(self, step: int) -> bool:
        """Whether the pass before ran out of memory on some rank: then `count` is another one, and the step is to be
        done again. Gradients and buffers are what they were before it. A collective.

        Raises the error of the pass, on the rank that had it, if the batch is in the smallest parts already.
        """
        if not self.grows:
            return False
        error, self.error = self.error, None
        world = self.strategy.world
        if not (error is not None if world.size == 1 else world.any_of([error is not None])[0]):
            return False
        ranks = [rank for rank, failed in enumerate(world.all_gather_json(error is not None)) if failed]
        if self.count >= self.largest:
            if error is not None:
                raise error
            world.barrier()  # it ends when the launcher has seen the other rank fail
        del error  # its frames hold tensors
        gc.collect()
        self.strategy.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.count, self.redoes = min(2 * self.count, self.largest), True
        if world.is_rank_zero:
            log.warning(
                "rank %d ran out of memory in step %d, which is done again: from here on a batch is cut into %d "
                "micro-batches, as with trainer.gradient_accumulation_steps=%d",
                *(ranks[0], step, self.count, self.count),
            )
        return True
