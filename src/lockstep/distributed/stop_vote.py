"""A vote on a few flags, such as "stop" and "save", that does not make the ranks wait for its result."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lockstep.distributed.world import World

VOTE_PAUSE = 0.25  # seconds between two votes


class StopVote:
    """All ranks agree on flags a few times a second. A result is read one vote later, when it has arrived already.

    Every rank calls `cast` after every step, or after every batch of an evaluation. There are as many steps between two
    votes as take `pause` seconds. The ranks agree on this number in the vote itself, so all of them vote, and read
    results, at the same steps.
    """

    def __init__(self, world: World, flags: int, pause: float = VOTE_PAUSE) -> None:
        self.group, self.pause = world.control, pause
        self.pending: tuple[dist.Work, torch.Tensor] | None = None
        self.wishes = [False] * flags
        self.stride = self.steps_left = 1
        self.last_vote = time.monotonic()

    def cast(self, *wishes: bool) -> tuple[bool, ...]:
        """Vote for flags. Returns the flags that a rank had voted for in the previous vote, if it is counted now."""
        self.wishes = [new or old for new, old in zip(wishes, self.wishes, strict=True)]
        self.steps_left -= 1
        if self.steps_left:
            return (False,) * len(wishes)
        outcome = self.close()
        now = time.monotonic()
        fitting = int(self.pause * self.stride / max(now - self.last_vote, 1e-9))
        stride = max(1, min(fitting, 2 * self.stride))
        votes = torch.tensor([-stride, *self.wishes], dtype=torch.int32)  # MAX of -stride: the smallest stride wins
        with hide_from_profiler():
            work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None
        self.pending = work, votes
        self.steps_left, self.last_vote = self.stride, now
        self.wishes = [False] * len(wishes)
        return outcome

    def close(self) -> tuple[bool, ...]:
        """Count the vote that is still under way."""
        if self.pending is None:
            return (False,) * len(self.wishes)
        work, votes = self.pending
        work.wait()
        self.pending = None
        stride, *outcome = votes.tolist()
        self.stride = -stride
        return tuple(bool(flag) for flag in outcome)


@contextmanager
def hide_from_profiler() -> Iterator[None]:
    """For the start of a collective that may end after torch's profiler has stopped.

    A recorded collective writes its end into the profiler's memory, from a thread of gloo. If the profiler has stopped
    by then, this memory is freed, and the write corrupts the heap (torch 2.14).
    """
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)
