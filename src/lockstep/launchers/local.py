"""launch=fork, spawn and torchrun: ranks that this process starts on its machine, watches, and starts again.

`fork` copies this process, so that ranks share one import of torch; `spawn` starts fresh interpreters.

This does not use torch's elastic agent, which `torchrun src/train.py` starts. That agent listens on all interfaces,
unpickles what it finds in its store, waits 30 s for a rank that does not end, and may name the wrong rank.
"""

import gc
import importlib
import itertools
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NoReturn

from annotated_types import Ge, Le

from lockstep.config.schema import Count, Ranks, StartMethod, Whole
from lockstep.distributed import signals
from lockstep.distributed.environment import DEFAULT_PORT, LOOPBACK, STARTED_BY, STORE_FILE, node_rank_info
from lockstep.distributed.host import cpu_count, end_with_parent
from lockstep.distributed.rendezvous import shared_store
from lockstep.distributed.signals import STOP_SIGNALS, Relay
from lockstep.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_HANG,
    EXIT_RESUMABLE,
    EXIT_STOPPED_WITHOUT_SNAPSHOT,
    RAISED_BY_ALL,
    CannotStartNow,
    ConfigError,
    RankFailed,
    RankMissing,
    StoppedEarly,
)
from lockstep.failures.record import FOLDER, heartbeat, read_place
from lockstep.failures.report import screen, tell, typed_command
from lockstep.launchers.base import Launcher, Worker, flush_output, print_line, refuse_nesting

POLL_SECONDS = 0.2  # where a process that a rank has forked hides the rank's end
AFTER_SECOND_SIGNAL = 1.5  # seconds until ranks that have not ended are killed
# The same after the end of a rank, by its exit code; and longer while a rank saves.
GRACE, LONGER_WHILE_SAVING = 5.0, 25.0
GRACES = {EXIT_FINISHED: math.inf, EXIT_RESUMABLE: 30.0, EXIT_HANG: 0.0}  # of the first two, rank 0 closes its loggers
STOP_EXITS = (EXIT_RESUMABLE, EXIT_STOPPED_WITHOUT_SNAPSHOT)


def resolve_nproc(nproc_per_node: int | str) -> int:
    """The number of ranks on this machine, by torchrun's rules.

    cpu: one per core. gpu: one per GPU. auto: one per GPU if there are any, else one per core. Raises ConfigError.
    """
    if isinstance(nproc_per_node, int):
        return nproc_per_node
    if nproc_per_node == "cpu":
        return cpu_count()
    import torch

    gpus = torch.cuda.device_count()
    if nproc_per_node == "gpu" and not gpus:
        raise ConfigError("launch.nproc_per_node=gpu finds no GPU here; type launch.nproc_per_node=cpu")
    return gpus or cpu_count()


class LocalLauncher(Launcher):
    """Ranks on this machine, and those of one run on several nodes: there the same command runs on each.

    start_method: fork: a copy of this process; spawn: a fresh interpreter for each rank.
    nproc_per_node: ranks on this machine, the same number on each; gpu: as many as GPUs; auto: GPUs, else CPUs.
    max_restarts: how often failed ranks are started again, all together, on one machine.
    nnodes: machines; run the same command on each with its own node_rank.
    node_rank: number of this machine.
    master_addr: address of the machine with node_rank 0.
    master_port: port there.
    """

    starts_processes = True

    def __init__(
        self,
        start_method: StartMethod,
        nproc_per_node: Ranks,
        max_restarts: Whole = 0,
        nnodes: Count = 1,
        node_rank: Whole = 0,
        master_addr: str = LOOPBACK,
        master_port: Annotated[int, Ge(1), Le(65535)] = DEFAULT_PORT,
    ) -> None:
        self.start_method, self.nproc_per_node, self.max_restarts = start_method, nproc_per_node, max_restarts
        self.nnodes, self.node_rank, self.node = nnodes, node_rank, (nnodes, node_rank, master_addr, master_port)

    def validate(self) -> None:
        resolve_nproc(self.nproc_per_node)
        refuse_nesting()
        if self.nnodes > 1:
            node_rank_info(*self.node)
            if self.start_method == "fork" or self.max_restarts:  # their store has threads, and no forks beside them
                raise ConfigError(
                    "several nodes need launch=spawn, and launch.max_restarts=0: torchrun --max-restarts can do that"
                )

    def num_ranks(self) -> tuple[int, int]:
        ranks = resolve_nproc(self.nproc_per_node)
        return self.nnodes * ranks, ranks

    def launch(self, worker: Worker, *args: Any) -> Any:
        """Run `worker(*args)` in every rank, again after a failure if restarts are left."""
        if self.start_method == "fork":
            importlib.import_module("lockstep.launchers.rank_imports")
        else:  # else the start of the first process starts it, and that unblocks the signals of `signals.blocked`
            multiprocessing.resource_tracker.ensure_running()
        world_size, ranks_here = self.num_ranks()
        numbers = range(self.node_rank * ranks_here, (self.node_rank + 1) * ranks_here)
        env = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(ranks_here),
            STARTED_BY: self.start_method,
        }
        if self.nnodes > 1:  # the parent of the first node hosts the store
            node = node_rank_info(*self.node)
            env |= {"MASTER_ADDR": node.master_addr, "MASTER_PORT": str(node.master_port)}
            env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            if node.is_rank_zero:
                shared_store(node)
        # Made before the ranks, the folder of multiprocessing is theirs, too: it goes with the last of them.
        temporary = multiprocessing.util.get_temp_dir()
        with Relay() as relay:
            for attempt in itertools.count():
                folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=temporary))
                here = {FOLDER: str(folder), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
                here |= {STORE_FILE: str(folder / "store")} if self.nnodes == 1 else {}
                try:
                    return RankProcesses(self.start_method, numbers, folder, relay).run(env | here, worker, args)
                except RankFailed as failed:
                    is_alike = failed.report.get("first", {}).get("kind") in RAISED_BY_ALL
                    if attempt == self.max_restarts or relay.first is not None or is_alike:
                        raise
                    if failed.report.get("will_fail_again"):
                        print_line("lockstep: no restart: the same failure came again at the same step", sys.stdout)
                        raise
                    headline = str(failed).partition("\n")[0]
                    print_line(f"{headline}\nlockstep: restart {attempt + 1} of {self.max_restarts}", sys.stdout)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class RankProcesses:
    """The ranks of one start. folder: that they share. relay: gives them the signals of this process."""

    start_method: str
    numbers: range
    folder: Path
    relay: Relay
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)

    def run(self, env: dict[str, str], worker: Worker, args: tuple[Any, ...]) -> Any:
        """Start all ranks and wait for them. Returns rank 0's value."""
        from torch import multiprocessing as torch_multiprocessing  # it shares tensors that are sent between processes

        heartbeat.begin()
        context: Any = torch_multiprocessing.get_context(self.start_method)
        reader, writer = multiprocessing.Pipe(duplex=False)
        processes = {
            rank: context.Process(target=run_rank, args=(local, rank, env, writer, worker, args))
            for local, rank in enumerate(self.numbers)
        }
        try:
            with signals.blocked():
                for process in processes.values():
                    process.start()
                self.relay.start([process.pid for process in processes.values()])
            value = self._wait(processes, reader)
            failure = self._failure()
            if failure is not None:
                raise failure
            return value
        finally:
            for process in processes.values():
                if process.is_alive():
                    process.kill()
            reader.close()
            writer.close()

    def _wait(self, processes: dict[int, Any], results: "Connection[Any, Any]") -> Any:
        """Wait until all ranks have ended. Returns rank 0's value, which may be larger than a pipe holds.

        Kills those that do not end, after a failure or while the others have stopped.
        """
        value, relay, waiting, killed, deadline = None, self.relay, dict(processes), set[int](), math.inf
        while waiting:
            sentinels = [process.sentinel for process in waiting.values()]
            multiprocessing.connection.wait([*sentinels, results], POLL_SECONDS)
            value = results.recv() if results.poll() else value
            now = time.monotonic()
            for rank in [rank for rank, process in waiting.items() if not process.is_alive()]:
                code = waiting.pop(rank).exitcode
                self.ends[rank] = {"exit_code": code, "time": time.time(), "is_echo": rank in killed}
                counts = (
                    code == EXIT_HANG or read_place(self.folder, rank).name == "end"
                )  # else it has left without a word
                deadline = min(deadline, now + (GRACES.get(code, GRACE) if counts else GRACE))
            if relay.second is not None:
                deadline = min(deadline, relay.second_at + AFTER_SECOND_SIGNAL)
            for rank, process in waiting.items():
                may_save = relay.second is None and EXIT_HANG not in [end["exit_code"] for end in self.ends.values()]
                saves = may_save and read_place(self.folder, rank).name in ("snapshot", "disk")
                if now > deadline + LONGER_WHILE_SAVING * saves:
                    killed.add(rank)
                    process.kill()
        return results.recv() if results.poll() else value

    def _failure(self) -> BaseException | None:
        """What the exit codes of the ranks and their records say; None if all have finished."""
        codes, relay = [end["exit_code"] for end in self.ends.values()], self.relay
        before_training = [number for number in STOP_SIGNALS if 128 + number in codes]
        have_stopped = any(code in STOP_EXITS for code in codes)
        stopped = None
        if relay.second is not None:
            stopped = signals.ended_at_once(relay.second, in_training=True)
        elif have_stopped and all(code in (EXIT_FINISHED, *STOP_EXITS) for code in codes):
            return StoppedEarly("the ranks stopped early", max(code or 0 for code in codes))  # rank 0 has said so
        elif before_training:
            stopped = signals.ended_at_once(before_training[0], in_training=False)
        elif have_stopped and relay.first is not None:
            stopped = signals.unanswered_stop()
        if stopped is not None:
            print_line(f"lockstep: {stopped}", sys.stderr)
            return stopped
        report, _ = tell(self.folder, typed_command(), ends=self.ends)
        if report is None:
            what = "lockstep: a rank ended before it could say why; its own words are above"
            return RankFailed(what, {}) if any(codes) else None
        first = report["first"]
        if first["kind"] != "config":
            return RankFailed(screen(report), report)
        can_start_later = first.get("type") in (CannotStartNow.__name__, RankMissing.__name__)
        return (CannotStartNow if can_start_later else ConfigError)(first["message"])


def run_rank(
    local_rank: int,
    rank: int,
    env: dict[str, str],
    results: "Connection[Any, Any]",
    worker: Worker,
    args: tuple[Any, ...],
) -> NoReturn:
    """What a rank process runs: `worker(*args)`, then an exit that skips the interpreter's teardown.

    results: takes rank 0's value. How the rank ends stands in the folder of ranks, and the launcher shows it. The
    teardown is skipped since gloo's threads sometimes abort it, and a finished run would count as failed.
    """
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(local_rank))
    gc.freeze()  # a collection writes to every object, and memory shared with the parent is copied when written to
    signals.leave_last_line_to_launcher()
    end_with_parent()
    heartbeat.begin(rank, int(env["WORLD_SIZE"]))
    heartbeat.share(Path(env[FOLDER]))
    try:
        value = worker(*args)
        if rank == 0:
            results.send(value)
        heartbeat.enter("end")
        code = EXIT_FINISHED
    except StoppedEarly as stopped:
        heartbeat.enter("end")
        code = stopped.code
    except BaseException as error:  # SystemExit, too: leaving before the end is a failure
        heartbeat.fails(error)
        code = EXIT_FAILED
    flush_output()
    signals.remove_folder_of_launcher()
    os._exit(code)
