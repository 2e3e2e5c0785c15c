"""Which process is which rank (`launch.recover=live`): the launcher publishes generations, and ranks read them.

A generation is in the launcher's store. Its number is also in a page of memory that all ranks see, so that looking for
a newer one costs nothing.
"""

import json
import mmap
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.distributed.loss_pages import PAGE_BYTES

if TYPE_CHECKING:
    from torch.distributed import Store

FINISHED, LOST = "finished", "lost"  # how a generation ended
LOSS, GROWN = "the loss", "a new rank was ready"  # reasons for a new generation
MEET_AGAIN = "meet again"  # what a rank sends to the launcher, with its generation's number, if no rank died
TRAINS, WAITS, OVER = 0, 1, 2  # the launcher watches; it has seen a death and publishes soon; it publishes no more


@dataclass(frozen=True)
class Generation:
    """processes: the number of the process that is rank 0, 1, ... full_size: as many ranks as the user asked for.

    changed_at: time.monotonic() of what made it necessary. reason: LOSS or GROWN. lost: the ranks that have died since
    a generation has last noted its recovery.
    """

    number: int = -1
    processes: list[int] = field(default_factory=list)
    full_size: int = 0
    changed_at: float = 0.0
    reason: str = ""
    lost: list[str] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """What made it necessary, with the ranks that died."""
        if not self.lost:
            return self.reason
        return self.reason + (" of " if self.reason == LOSS else "; lost before: ") + ", ".join(self.lost)


class Notice:
    """The last page of `pages`: the number of the newest generation, and what the launcher does."""

    def __init__(self, pages: mmap.mmap) -> None:
        self.pages, self.offset = pages, len(pages) - PAGE_BYTES

    def read(self) -> tuple[int, int]:
        """(the newest generation; TRAINS, WAITS or OVER)."""
        newest, state = struct.unpack_from("2q", self.pages, self.offset)
        return newest, state

    def write(self, newest: int, state: int) -> None:
        struct.pack_into("2q", self.pages, self.offset, newest, state)


def open_notice(path: str) -> Notice:
    """path: of the pages, see `lockstep.distributed.loss_pages`."""
    with Path(path).open("r+b") as file:
        return Notice(mmap.mmap(file.fileno(), 0))


def publish(store: "Store", notice: Notice, generation: Generation) -> None:
    """Called by the launcher: from now on the ranks are those of `generation`."""
    store.set(f"live/{generation.number}", json.dumps(asdict(generation)))
    notice.write(generation.number, TRAINS)


def read_generation(store: "Store", number: int) -> Generation:
    return Generation(**json.loads(store.get(f"live/{number}")))


def note_recovery(store: "Store", generation: Generation) -> None:
    """Called by ranks that have logged how their generation came to be."""
    store.set(f"live/{generation.number}/recovered", "")


def has_recovered(store: "Store", generation: Generation) -> bool:
    return bool(store.check([f"live/{generation.number}/recovered"]))


def has_finished(store: "Store", generation: Generation, lost: bool = False) -> bool:
    """Whether every rank of `generation` has finished its work: for good, as no rank of it is replaced from then on.

    lost: another generation follows, so without a True now it will never be True. The launcher asks so before it
    publishes that: a rank that finishes at that moment must not leave while the others wait for it there.
    """
    number = generation.number
    all_done = store.check([f"live/{number}/done/{rank}" for rank in range(len(generation.processes))])
    if not all_done and not lost:
        return False
    return bool(store.compare_set(f"live/{number}/end", "", FINISHED if all_done else LOST) == FINISHED.encode())
