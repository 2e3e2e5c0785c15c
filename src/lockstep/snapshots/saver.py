"""Which form a snapshot has, and how a thread writes it: rank 0 all of it, or each rank its part."""

import logging
import secrets
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.distributed.world import DISK_TIMEOUT, World
from lockstep.errors import ConfigError
from lockstep.snapshots.files import explain, save_snapshot
from lockstep.snapshots.parts import INFIX, blocks_of, described, write_part
from lockstep.snapshots.state_dict import CopyMemory, collect_state, plain_copy
from lockstep.snapshots.writer import BackgroundWriter
from lockstep.strategies.base import Strategy
from lockstep.training.state import TrainState

log = logging.getLogger(__name__)

SHARDED_ABOVE = 2**30  # bytes of weights, optimizer state and average, from which snapshot.format=auto saves parts


def validate_format(form: str, strategy: Strategy) -> None:
    """Raise ConfigError if `snapshot.format` asks for parts that the ranks do not hold."""
    if form == "sharded" and not strategy.shards_state:
        raise ConfigError(
            "snapshot.format=sharded wants ranks that hold parts of the state, and with this strategy each holds all "
            "of it; type snapshot.format=auto, or strategy=fsdp"
        )


class Saver:
    """Saves `state` to `folder`. Every rank calls every method.

    form: `snapshot.format`. keep_last: how many numbered snapshots stay. damaged: those that were passed over when the
    run was resumed, on rank 0: they do not push out good ones.
    """

    def __init__(self, state: TrainState, folder: Path, writer: BackgroundWriter, keep_last: int, form: str) -> None:
        self.state, self.folder, self.writer = state, folder, writer
        self.keep_last, self.form = keep_last, form
        self.damaged: set[Path] = set()
        self.part_memory = CopyMemory()
        self.thread_world: World | None = None  # of the writing threads, while the others use their own groups

    @property
    def world(self) -> World:
        return self.state.strategy.world

    def collect(self, totals: Tensor, scheduler_as_built: dict[str, Any]) -> dict[str, Any] | None:
        """The state as `put` takes it, not copied yet; None on a rank that writes nothing. A collective."""
        strategy = self.state.strategy
        if self.form != "full" and strategy.shards_state:
            contents = collect_state(self.state, totals, scheduler_as_built, strategy.own_blocks)
            ending = self._ending_of_parts(contents)
            if ending is not None:
                return contents | {"parts": ending}
        contents = collect_state(self.state, totals, scheduler_as_built, strategy.full_state)
        return contents if self.world.is_rank_zero else None

    def _ending_of_parts(self, contents: dict[str, Any]) -> str | None:
        """The end of the name of the folder of parts, the same on all ranks. None: this state is saved in one file."""
        mine = sum(block.values.nbytes for block in blocks_of(contents) if block.values is not None)
        of_ranks = self.world.all_gather_json([mine, secrets.token_hex(4)])
        if self.form == "auto" and (self.world.size == 1 or sum(size for size, _ in of_ranks) < SHARDED_ABOVE):
            return None
        if self.thread_world is None:
            self.thread_world = self.world.for_thread(DISK_TIMEOUT)
        return str(of_ranks[0][1])

    def put(self, name: str, contents: dict[str, Any], position: dict[str, Any]) -> None:
        """Copy `contents`, of `collect` and what the caller added, and let the thread write them as `name`."""
        if "parts" not in contents:
            self.writer.put(self._write, name, plain_copy(contents), position)
            return
        self.writer.drain()  # one copy of a part at a time
        self.writer.put(self._write_in_parts, name, self.part_memory.plain_copy(contents), position)

    def finish(self) -> None:
        """Wait until the last snapshot is on the disk, and free the memory of its copy."""
        self.writer.drain()
        self.part_memory = CopyMemory()

    def _write(self, name: str, contents: dict[str, Any], position: dict[str, Any]) -> None:
        """In the writer's thread. A full disk costs a warning, not the training."""
        try:
            path = save_snapshot(self.folder, name, contents, self.keep_last, self.damaged, **position)
            self.damaged.discard(path)
        except OSError as error:
            if "parts" in position:  # the largest files, on a disk that may be full
                shutil.rmtree(self.folder / position["parts"], ignore_errors=True)
            self._warn(position["step"], explain(error, self.folder))

    def _write_in_parts(self, name: str, contents: dict[str, Any], position: dict[str, Any]) -> None:
        """In the writer's thread of each rank. Rank 0 writes the snapshot's own file when all parts are on the disk."""
        folder = self.folder / f"{name}{INFIX}{contents['parts']}"
        report: dict[str, Any] = {"problem": None}
        try:
            report |= write_part(folder / f"rank_{self.world.rank}.bin", contents)
        except OSError as error:
            report["problem"] = explain(error, self.folder)
        assert self.thread_world is not None
        try:
            reports = self.thread_world.gather_state(report)
        except RuntimeError as error:  # a rank has died, which ends the training, too
            log.warning("no snapshot at step %d: a rank was lost (%s)", position["step"], str(error).splitlines()[0])
            return
        if not self.world.is_rank_zero:
            return
        problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(reports) if each["problem"]]
        if problems:
            shutil.rmtree(folder, ignore_errors=True)
            self._warn(position["step"], "; ".join(problems))
            return
        self._write(name, contents | described(folder, reports), position | {"parts": folder.name})

    def _warn(self, step: int, reason: str) -> None:
        log.warning("no snapshot at step %d: %s; training goes on", step, reason)
