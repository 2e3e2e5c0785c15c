"""Starts the ranks of this machine, watches how they end, and starts them again after a failure."""

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.distributed.environment import RankInfo
from lockstep.distributed.rendezvous import store_address
from lockstep.distributed.signals import Relay, blocked
from lockstep.failures.start import MonitorLink
from lockstep.launchers.base import RankFailed, Worker
from lockstep.launchers.processes import failure_of, print_line, run_rank
from lockstep.launchers.stopping import fork_server_killed, stopped_early, wait_for_ranks


class Supervisor:
    """The ranks of this machine, first_rank and the following.

    env: what all of them find in their environment. host_store: opens the ranks' store in this process, if it is here.
    """

    def __init__(
        self,
        start_method: str,
        ranks: int,
        first_rank: int,
        env: dict[str, str],
        max_restarts: int,
        host_store: Callable[[], object],
    ) -> None:
        from torch import multiprocessing as torch_multiprocessing  # it shares tensors that are sent between processes

        self.context: Any = torch_multiprocessing.get_context(start_method)
        self.ranks, self.first_rank, self.env = ranks, first_rank, env
        self.max_restarts, self.host_store = max_restarts, host_store

    def run(self, worker: Worker, *args: Any) -> Any:
        """Run `worker(*args)` in every rank, again after a failure if restarts are left. Returns rank 0's value.

        Raises what `Launcher.launch` raises.
        """
        # Made before the ranks, the folder of multiprocessing is theirs, too: it goes with the launcher or the monitor.
        with MonitorLink(multiprocessing.util.get_temp_dir()) as monitor, Relay() as relay:
            attempt = 0
            while True:
                failure, value = self._attempt(monitor, relay, attempt, worker, args)
                if failure is None:
                    return value
                if not isinstance(failure, RankFailed) or attempt == self.max_restarts or relay.first is not None:
                    raise failure
                if failure.is_raised_by_all:
                    raise failure
                if failure.will_fail_again:
                    print_line("lockstep: no restart: the same failure came again at the same step", sys.stdout)
                    raise failure
                attempt += 1
                print_line(f"{failure.headline}\nlockstep: restart {attempt} of {self.max_restarts}", sys.stdout)
                monitor.next_attempt(attempt)

    def _attempt(
        self, monitor: MonitorLink, relay: Relay, attempt: int, worker: Worker, args: tuple[Any, ...]
    ) -> tuple[BaseException | None, Any]:
        """Start all ranks and wait for them. Returns (the failure, None) or (None, rank 0's value)."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        env = self.env | monitor.environment | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        processes = [
            self.context.Process(
                target=_run_supervised_rank, args=(number, self.first_rank + number, env, writer, worker, args)
            )
            for number in range(self.ranks)
        ]
        try:
            with blocked():
                for process in processes:
                    process.start()
                relay.start([process.pid or 0 for process in processes])
            self.host_store()  # after the ranks are forked: a fork copies locks that a thread of the store may hold
            codes = wait_for_ranks(processes, relay)
            failure = self._failure(monitor, relay, codes, processes)
            return failure, reader.recv() if failure is None and reader.poll() else None
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            reader.close()
            writer.close()

    def _failure(
        self, monitor: MonitorLink, relay: Relay, codes: list[int], processes: list[BaseProcess]
    ) -> BaseException | None:
        lost = fork_server_killed(codes, [process.pid or 0 for process in processes])
        if lost is not None:
            return lost
        stopped = stopped_early(codes, relay)
        if stopped is not None:
            return stopped
        exit_codes = {process.pid or 0: code for process, code in zip(processes, codes, strict=True)}
        report = monitor.report(exit_codes)
        if report is None and any(codes):
            code = next(code for code in codes if code)
            return RankFailed(f"lockstep: a rank ended with {code}; look at logs/ in the run folder for its error", {})
        return None if report is None else failure_of(report)


def rank_environment(node: RankInfo, world_size: int, ranks_here: int, name: str) -> dict[str, str]:
    """What all ranks of this machine find in their environment. node: where their store listens."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_here),
        "MASTER_ADDR": store_address(node),
        "MASTER_PORT": str(node.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # a launcher hosts the store, not rank 0
        "LOCKSTEP_STARTED_BY": name,
    }


def _run_supervised_rank(
    local_rank: int,
    rank: int,
    env: dict[str, str],
    results: "Connection[Any, Any]",
    worker: Worker,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(local_rank))
    run_rank(worker, args, results if rank == 0 else None)
