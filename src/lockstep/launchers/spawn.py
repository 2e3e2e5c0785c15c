"""launch=spawn and launch=fork: Python's multiprocessing on this machine, or the same command on each of several."""

from typing import Any

from lockstep.distributed.environment import RankInfo, node_rank_info
from lockstep.distributed.rendezvous import close_store, hold_port, shared_store
from lockstep.errors import ConfigError
from lockstep.launchers.base import Launcher, Worker, refuse_nesting
from lockstep.launchers.processes import preload, resolve_nproc, start_method_here, validate_start_method
from lockstep.launchers.supervisor import Supervisor, rank_environment


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

    def prepare(self, rank_imports: str) -> None:
        self.start_method = start_method_here(self.start_method, self.nnodes > 1, rank_imports)
        preload(self.start_method, rank_imports)

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
        node = self._node() if self.master_port else hold_port(self._node())
        world_size, ranks_here = self.num_ranks()
        env = rank_environment(node, world_size, ranks_here, self.name) | {"GROUP_RANK": str(self.node_rank)}
        first_rank = self.node_rank * ranks_here
        # Elsewhere only the ranks need the store: this process would wait for node 0 and hear no signal meanwhile.
        host_store = (lambda: shared_store(node)) if self.node_rank == 0 else (lambda: None)
        supervisor = Supervisor(self.start_method, ranks_here, first_rank, env, 0, host_store)
        try:
            return supervisor.run(worker, *args)
        finally:
            if self.nnodes == 1:  # nodes end a job at different times, so theirs stays for the next job of a sweep
                close_store(node)

    def _node(self) -> RankInfo:
        return node_rank_info(self.nnodes, self.node_rank, self.master_addr, self.master_port)
