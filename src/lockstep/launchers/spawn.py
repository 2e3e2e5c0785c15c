"""launch=spawn and launch=fork: torch.multiprocessing on this machine, or the same command on each of several."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from lockstep.distributed.environment import RankInfo, node_rank_info
from lockstep.distributed.signals import forwarded_to
from lockstep.distributed.store import close_store, shared_store
from lockstep.errors import ConfigError
from lockstep.launchers.base import Launcher, Worker, refuse_nesting
from lockstep.launchers.processes import preload, rank_failure, resolve_nproc, run_rank, validate_start_method

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext


class SpawnLauncher(Launcher):
    """On several nodes the same command runs on each, with its own `node_rank`.

    start_method: spawn, fork or forkserver. nproc_per_node: ranks, or auto, gpu or cpu; the same number on each node.
    master_addr, master_port: where node 0 listens. Port 0 takes a free one, for one node only.
    """

    starts_processes = True

    def __init__(
        self,
        start_method: str,
        nproc_per_node: int | str,
        nnodes: int,
        node_rank: int,
        master_addr: str,
        master_port: int,
    ) -> None:
        self.start_method, self.nproc_per_node = start_method, nproc_per_node
        self.nnodes, self.node_rank = nnodes, node_rank
        self.master_addr, self.master_port = master_addr, master_port
        self.name = "fork" if start_method == "fork" else "spawn"

    def prepare(self) -> None:
        preload(self.start_method)

    def validate(self) -> None:
        validate_start_method(self.start_method)
        resolve_nproc(self.nproc_per_node)
        refuse_nesting(self.name)
        if self.start_method == "fork" and self.nnodes > 1:
            raise ConfigError(
                "launch=fork is for one machine: the parents of several machines share a store, which has threads, and "
                "a process with threads cannot fork safely; type launch=spawn"
            )
        self._node()

    def num_ranks(self) -> tuple[int, int]:
        ranks = resolve_nproc(self.nproc_per_node)
        return self.nnodes * ranks, ranks

    def launch(self, worker: Worker, *args: Any) -> Any:
        from torch.multiprocessing.spawn import start_processes

        node = self._node()
        world_size, ranks_here = self.num_ranks()
        first_rank = self.node_rank * ranks_here
        env = self._rank_environment(node, world_size, ranks_here)
        reader, writer = multiprocessing.Pipe(duplex=False)
        processes = start_processes(
            _run_spawned_rank,
            (first_rank, env, writer, worker, args),
            ranks_here,
            join=False,
            start_method=self.start_method,
        )
        try:
            _host_store(node, processes)
            _join(processes, first_rank)
            return reader.recv() if reader.poll() else None
        finally:
            reader.close()
            writer.close()
            if self.nnodes == 1:  # nodes end a job at different times, so theirs stays for the next job of a sweep
                close_store(node)

    def _node(self) -> RankInfo:
        return node_rank_info(self.nnodes, self.node_rank, self.master_addr, self.master_port)

    def _rank_environment(self, node: RankInfo, world_size: int, ranks_here: int) -> dict[str, str]:
        """What all ranks of this node find in their environment."""
        return {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(ranks_here),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": node.master_addr,
            "MASTER_PORT": str(node.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process hosts the store, not rank 0
            "LOCKSTEP_STARTED_BY": self.name,
        }


def _host_store(node: RankInfo, processes: "ProcessContext") -> None:
    """Open the store, after the ranks are forked: a fork copies locks that a thread of the store may hold forever."""
    try:
        shared_store(node)
    except BaseException:
        for process in processes.processes:
            process.kill()
        raise


def _join(processes: "ProcessContext", first_rank: int) -> None:
    """Wait for all ranks. Raises the exception of the rank that fails first."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    try:
        with forwarded_to(processes.pids()):
            while not processes.join():
                pass
    except ProcessExitedException as error:
        raise rank_failure(first_rank + error.error_index, error.exit_code, str(error)) from None
    except ProcessRaisedException as error:
        raise rank_failure(first_rank + error.error_index, 1, str(error).strip()) from None


def _run_spawned_rank(
    local_rank: int,
    first_rank: int,
    env: dict[str, str],
    results: "Connection[Any, Any]",
    worker: Worker,
    args: tuple[Any, ...],
) -> None:
    rank = first_rank + local_rank
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(local_rank))
    value = run_rank(worker, *args)
    if rank == 0:
        results.send(value)
