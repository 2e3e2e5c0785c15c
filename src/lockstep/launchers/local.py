"""launch=fork, spawn and torchrun: ranks that this process starts on its machine, watches, and starts again.

`fork` copies this process, so that ranks share one import of torch; `spawn` starts fresh interpreters.

This does not use torch's elastic agent, which `torchrun src/train.py` starts. That agent listens on all interfaces,
unpickles what it finds in its store, waits 30 s for a rank that does not end, and may name the wrong rank.
"""

import gc
import importlib
import itertools
import math
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from annotated_types import Ge, Le

from lockstep import errors
from lockstep.config.schema import Count, Ranks, StartMethod, Whole
from lockstep.distributed import signals
from lockstep.distributed.environment import DEFAULT_PORT, LOOPBACK, STARTED_BY, STORE_FILE, RankInfo, node_rank_info
from lockstep.distributed.host import end_with_parent, usable_cores
from lockstep.distributed.rendezvous import shared_store
from lockstep.errors import ConfigError, RankFailed, StoppedEarly, print_line
from lockstep.failures.record import Record, heartbeat, read_place
from lockstep.failures.report import Ends, screen, tell
from lockstep.launchers.base import Launcher, Worker, flush_output, refuse_nesting

POLL_SECONDS = 0.2  # where a process that a rank has forked hides the rank's end
AFTER_SECOND_SIGNAL = 1.5  # seconds until ranks that have not ended are killed
# The same after the end of a rank, by its exit code; and longer after a failure while a rank saves.
GRACE, LONGER_WHILE_SAVING = 5.0, 25.0
GRACES = {errors.EXIT_FINISHED: math.inf, errors.EXIT_RESUMABLE: 30.0}  # rank 0 closes its loggers


def resolve_nproc(nproc_per_node: int | str) -> int:
    """The number of ranks on this machine, by torchrun's rules. Raises ConfigError."""
    if isinstance(nproc_per_node, int):
        return nproc_per_node
    import torch

    gpus = torch.cuda.device_count() if nproc_per_node != "cpu" else 0
    if nproc_per_node == "gpu" and not gpus:
        raise ConfigError("launch.nproc_per_node=gpu finds no GPU here; type launch.nproc_per_node=cpu")
    return gpus or len(usable_cores())


@dataclass
class LocalLauncher(Launcher):
    """Ranks on this machine, and those of one run on several nodes: there the same command runs on each, with its own
    `node_rank`. conf/launch/fork.yaml and spawn.yaml describe the keys."""

    starts_processes = True

    start_method: StartMethod
    nproc_per_node: Ranks
    max_restarts: Whole = 0
    nnodes: Count = 1
    node_rank: Whole = 0
    master_addr: str = LOOPBACK
    master_port: Annotated[int, Ge(1), Le(65535)] = DEFAULT_PORT

    def validate(self) -> None:
        resolve_nproc(self.nproc_per_node)
        refuse_nesting()
        if self.nnodes > 1:
            self.node()  # refuses a number that does not fit
            if self.start_method == "fork" or self.max_restarts:  # their store has threads, and no forks beside them
                advice = "launch.max_restarts=0: torchrun --max-restarts can do that"
                raise ConfigError(f"several nodes need launch=spawn, and {advice}")

    def node(self) -> RankInfo:
        return node_rank_info(self.nnodes, self.node_rank, self.master_addr, self.master_port)

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
        env = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(ranks_here), STARTED_BY: self.start_method}
        if self.nnodes > 1:  # the parent of the first node hosts the store
            env |= {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)}
            env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            if self.node_rank == 0:
                shared_store(self.node())
        with signals.Relay() as relay:
            for attempt in itertools.count():
                try:
                    return self._run(env | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}, relay, worker, args)
                except RankFailed as failed:
                    is_alike = failed.report.get("first", {}).get("kind") in errors.RAISED_BY_ALL
                    if attempt == self.max_restarts or relay.first is not None or is_alike:
                        raise
                    if failed.report.get("will_fail_again"):
                        print_line("lockstep: no restart: the same failure came again at the same step", sys.stdout)
                        raise
                    headline = str(failed).partition("\n")[0]
                    print_line(f"{headline}\nlockstep: restart {attempt + 1} of {self.max_restarts}", sys.stdout)

    def _run(self, env: dict[str, str], relay: signals.Relay, worker: Worker, args: tuple[Any, ...]) -> Any:
        """Start the ranks of this machine once, and wait for them. Returns rank 0's value."""
        # Made before the ranks, the folder of multiprocessing is theirs, too: it goes with the last of them.
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=multiprocessing.util.get_temp_dir()))
        env |= {STORE_FILE: str(folder / "store")} if self.nnodes == 1 else {}
        heartbeat.begin()
        context: Any = multiprocessing.get_context(self.start_method)
        reader, writer = context.Pipe(duplex=False)
        ranks_here = int(env["LOCAL_WORLD_SIZE"])
        processes = {
            rank: context.Process(target=run_rank, args=(rank, rank % ranks_here, folder, env, writer, worker, args))
            for rank in range(self.node_rank * ranks_here, (self.node_rank + 1) * ranks_here)
        }
        try:
            with signals.blocked():
                for process in processes.values():
                    process.start()
                relay.start([process.pid for process in processes.values()])
            value, ends = wait(processes, reader, folder, relay)
            check_ends(folder, ends, relay)
            return value
        finally:
            for process in processes.values():
                if process.is_alive():
                    process.kill()
            reader.close()
            writer.close()
            shutil.rmtree(folder, ignore_errors=True)


def wait(processes: dict[int, Any], results: Any, folder: Path, relay: signals.Relay) -> tuple[Any, Ends]:
    """Wait until all ranks have ended. Returns rank 0's value, which may be larger than a pipe holds, and their ends.
    Kills those that do not end, after a failure or while the others have stopped."""
    value, ends, waiting, deadline = None, dict[int, Record](), dict(processes), math.inf
    killed = set[int]()
    while waiting or results.poll():
        sentinels = [process.sentinel for process in waiting.values()]
        multiprocessing.connection.wait([*sentinels, results], POLL_SECONDS)
        value = results.recv() if results.poll() else value
        now = time.monotonic()
        for rank in [rank for rank, process in waiting.items() if not process.is_alive()]:
            code = waiting.pop(rank).exitcode
            ends[rank] = {"exit_code": code, "time": time.time(), "is_echo": rank in killed}
            ends_well = read_place(folder, rank).name == "end"  # else it has left without a word
            grace = 0.0 if code == errors.EXIT_HANG else GRACES.get(code, GRACE) if ends_well else GRACE
            deadline = min(deadline, now + grace)
        if relay.second is not None:
            deadline = min(deadline, now + AFTER_SECOND_SIGNAL)
        have_stopped = all(end["exit_code"] in errors.STOP_EXITS for end in ends.values())
        longer = math.inf if have_stopped else LONGER_WHILE_SAVING  # a mirror may be slow
        may_save = relay.second is None and errors.EXIT_HANG not in [end["exit_code"] for end in ends.values()]
        for rank, process in waiting.items():
            saves = may_save and read_place(folder, rank).name in ("snapshot", "disk")
            if now > deadline + (longer if saves else 0):
                killed.add(rank)
                process.kill()
    return value, ends


def check_ends(folder: Path, ends: Ends, relay: signals.Relay) -> None:
    """Raise what the exit codes of the ranks and their records in the folder say, unless all have finished."""
    codes = [ends[rank]["exit_code"] for rank in sorted(ends)]
    stops = [code for code in codes if code in errors.STOP_EXITS]
    has_said_so = codes[0] in stops  # the first rank of a machine does
    if relay.second is not None or (stops and relay.first is not None and not has_said_so):
        stopped = signals.stopped_early(relay.second)
        print_line(f"lockstep: {stopped}", sys.stderr)
        raise stopped
    if stops and (relay.first is not None or all(code in (errors.EXIT_FINISHED, *stops) for code in codes)):
        raise StoppedEarly("the ranks stopped early", max(stops))
    report, _ = tell(folder, ends=ends)
    if report and report["first"]["kind"] == "config":
        raise ConfigError(report["first"]["message"])
    if report or any(codes):
        unknown = "lockstep: a rank ended before it could say why; its own words are above"
        raise RankFailed(screen(report) if report else unknown, report)


def run_rank(
    rank: int, local_rank: int, folder: Path, env: dict[str, str], results: Any, worker: Worker, args: tuple[Any, ...]
) -> NoReturn:
    """What a rank process runs: `worker(*args)`, then an exit that skips the interpreter's teardown, which gloo's
    threads sometimes abort. results: takes rank 0's value. The folder of ranks tells how this one ends."""
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(local_rank))
    gc.freeze()  # a collection writes to every object, and memory shared with the parent is copied when written to
    end_with_parent()
    heartbeat.begin(rank, int(env["WORLD_SIZE"]))
    heartbeat.share(folder, launcher=os.getppid())
    code = errors.EXIT_FINISHED
    try:
        value = worker(*args)
        if rank == 0:
            results.send(value)
        heartbeat.enter("end")
    except StoppedEarly as stopped:
        heartbeat.enter("end")
        code = stopped.code
    except BaseException as error:  # SystemExit, too: leaving before the end is a failure
        heartbeat.fails(error)
        code = errors.EXIT_FAILED
    flush_output()
    signals.clean_up()
    os._exit(code)
